"""The ranks of one kind that an ingress uses: membership, addresses, availability, discovery."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from cluster.routing.rank_client import RankClient, RankListener
from cluster.routing.ticket import Ticket
from contracts.errors import NotReadyError
from contracts.logs import event

log = logging.getLogger("tandem.routing")

SEARCH_PERIOD_S = 0.3  # while a rank is missing
POLL_PERIOD_S = 1.0
FIND_TIMEOUT_S = 10.0

FindRanks = Callable[[dict[str, str]], Awaitable[Mapping[str, str]]]
"""Addresses of ranks that must be replaced, with the reasons → client addresses of all ranks that
accept requests, by name."""


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of admission and placement.

    block_tokens: tokens per block of the ranks' prefix caches.
    max_waiting: sequences per rank and class without a first answer.
    request_share: fraction of those that one request may hold while others wait.
    ls_max_wait_s, be_max_wait_s, be_share: section `priority` of the configuration.
    max_attempts: ranks (or incarnations of one) that may fail with a request before it fails.
    attempt_reset_tokens: generated tokens after which earlier failures no longer count.
    no_rank_timeout_s: how long requests wait while no rank is available.
    """

    block_tokens: int = 16
    max_waiting: int = 1024
    request_share: float = 0.25
    ls_max_wait_s: float = 10.0
    be_max_wait_s: float = 300.0
    be_share: float = 0.1
    max_attempts: int = 3
    attempt_reset_tokens: int = 16
    no_rank_timeout_s: float = 60.0


class RankMember(RankListener):
    """A rank of the set, which listens to its client.

    is_member: it may receive new requests; False: it is draining or not started.
    replace_reason: why the launcher must replace it although it runs; usually empty.
    """

    def __init__(self, client: RankClient, *, is_member: bool = True) -> None:
        self.client, self.is_member, self.replace_reason = client, is_member, ""
        client.subscribe(self)

    @property
    def is_available(self) -> bool:
        """Return whether it accepts requests now."""
        return self.is_member and self.problem is None

    @property
    def problem(self) -> str | None:
        """The reason why it accepts no requests, or None."""
        return self.client.problem

    def join(self, address: str) -> None:
        """Use the rank at `address`; a new process replaces one that drains."""
        if not self.is_member and self.client.address != address:
            self.client.disconnect()
            self.client.set_address(address)
            self.client.start()
            event(log, "worker_joined", name=self.client.name)
        self.is_member = True
        self.client.set_address(address)

    def leave(self) -> bool:
        """Stop sending new requests. Return True once the rank can leave the set."""
        if self.is_member:
            self.is_member = False
            event(log, "worker_draining", name=self.client.name)
        return not self.client.has_open


MemberT = TypeVar("MemberT", bound=RankMember)


class RankSet(Generic[MemberT]):
    """Ranks of one kind, on one event loop.

    kind: name of the ranks in error messages.
    on_no_rank: called with an error when requests have waited no_rank_timeout_s without a rank.
    find: polled for ranks to add through `connect`; those that it no longer reports are drained.
    None: the set is fixed.
    connect: creates a member for a new name; None for ranks of other kinds.
    """

    def __init__(
        self,
        kind: str,
        members: Sequence[MemberT],
        no_rank_timeout_s: float,
        on_no_rank: Callable[[NotReadyError], None],
        find: FindRanks | None,
        connect: Callable[[str, str], MemberT | None] = lambda name, address: None,
    ) -> None:
        self.kind = kind
        self.on_available: Callable[[], None] = lambda: None
        self._all = list(members)  # including those that drain
        self._no_rank_timeout_s = no_rank_timeout_s
        self._on_no_rank = on_no_rank
        self._find = find
        self._connect = connect
        self._search: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[MemberT]:
        return iter([member for member in self._all if member.is_member])

    @property
    def clients(self) -> list[RankClient]:
        return [member.client for member in self]

    @property
    def available(self) -> list[MemberT]:
        return [member for member in self if member.is_available]

    def problems(self) -> list[str]:
        return [problem for member in self if (problem := member.problem) is not None]

    async def wait_ready(self) -> None:
        for member in self:
            await _wait_ready(member)

    async def close(self) -> None:
        self._find = None
        self._cancel_timeout()
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        for member in self._all:
            await member.client.close()

    # ---- requests that wait while no rank is available

    def update_timeout(self, *, has_waiting: bool) -> None:
        """Start or cancel the timeout, which runs while requests wait and no rank is available."""
        if not has_waiting or any(member.is_available for member in self):
            self._cancel_timeout()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._no_rank_timeout_s, self._on_timeout)

    def _cancel_timeout(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        reason = "; ".join(self.problems())
        self._on_no_rank(
            NotReadyError(f"no {self.kind} for {self._no_rank_timeout_s:g} s: {reason}")
        )

    # ---- discovery

    def ensure_polling(self) -> None:
        """Start the discovery unless it runs. Requires a running event loop."""
        if self._find is not None and (self._search is None or self._search.done()):
            self._search = asyncio.create_task(self._poll(self._find), name="find-ranks")

    async def _poll(self, find: FindRanks) -> None:
        while True:
            suspects = {m.client.address: m.replace_reason for m in self._all if m.replace_reason}
            try:
                async with asyncio.timeout(FIND_TIMEOUT_S):
                    addresses = await find(suspects)
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed
                event(log, "rank_discovery_failed", logging.WARNING, error=error)
            else:
                self._update(addresses)
            is_complete = all(member.is_available for member in self)
            await asyncio.sleep(POLL_PERIOD_S if is_complete else SEARCH_PERIOD_S)

    def _update(self, addresses: Mapping[str, str]) -> None:
        """Apply a report of the running ranks. An empty one is taken for incomplete."""
        remaining = dict(addresses)
        for member in list(self._all):
            if address := remaining.pop(member.client.name, ""):
                member.join(address)
            elif addresses and member.leave():
                self._all.remove(member)
                member.client.disconnect()
        for name, address in remaining.items():
            if (added := self._connect(name, address)) is not None:
                self._all.append(added)
                added.client.start()
                event(log, "worker_joined", name=name)


async def _wait_ready(member: RankMember) -> None:
    await member.client.wait_until(lambda _: member.problem is None)


class Placer(Protocol):
    """Policy that chooses the rank of each request and the time to send it.

    Requests wait while no rank is available, for at most no_rank_timeout_s.
    """

    config: RoutingConfig

    @property
    def ranks(self) -> RankSet[Any]: ...

    def put(self, ticket: Ticket) -> None:
        """Send the request to a rank, now or later, preferably to none of its failed clients.

        Raises what `Ticket.send` raises.
        """

    def record_answer(self, ticket: Ticket) -> None:
        """Record that part of the answer has arrived. May be called again."""

    def remove(self, ticket: Ticket) -> None:
        """Forget the request. No effect if it is unknown."""
