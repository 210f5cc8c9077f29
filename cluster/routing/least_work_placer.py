"""Which attention rank runs a request: it goes there at once, or waits while none has room.

The choice is a pure function over what is known of each rank. A rank's cost for a request is the
work in front of it: tokens outstanding there, without those of BE requests that it overtakes, plus
the request's own prompt tokens that are not in its prefix cache. On equally busy ranks that is the
longest prefix match; without any match it is the least load; and one prefix that all requests share
does not pile them up on one rank.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cluster.routing.placer import NoRankTimeout, RoutingConfig
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_discovery import FindRanks, RankDiscovery
from cluster.routing.ticket import Ticket
from contracts.errors import ChannelError, NotReadyError, TandemError
from contracts.logs import event
from contracts.messages import RankState
from contracts.ranks import Group
from contracts.requests import Priority
from contracts.routing_messages import WorkerReport, WorkerSnapshot

log = logging.getLogger("tandem.routing")

MAX_PREFIX_BLOCKS = 1 << 16  # known of each rank
_PREFIX = f"{Group.ATTENTION.value}-"


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice may depend on. load_tokens: prompt and generated tokens still outstanding, of
    what the request does not overtake."""

    name: str
    load_tokens: int
    prefix_tokens: int


Choose = Callable[[Sequence[RankView]], RankView]


def least_work(ranks: Sequence[RankView]) -> RankView:
    """The rank with the least work before this request is done; ties go to the longer prefix,
    then to the first."""
    return min(ranks, key=lambda rank: (rank.load_tokens - rank.prefix_tokens, -rank.prefix_tokens))


class PrefixTable:
    """Hashes of the blocks recently sent to one rank; the oldest are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are known."""
        for index, digest in enumerate(hashes):
            if digest not in self._blocks:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        for digest in reversed(hashes):  # so that a chain's end is forgotten before its beginning
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class _Rank:
    """A `rank_client.Listener`, and what this ingress has sent there. serves: it is one of those
    that there are; else nothing new is sent to it."""

    replace_reason = ""

    def __init__(self, client: RankClient, on_lost: Callable[[], None]) -> None:
        self.client = client
        self.is_member = True
        self._on_lost = on_lost
        self.prefixes = PrefixTable(MAX_PREFIX_BLOCKS)
        self._waiting: Counter[Priority] = Counter()
        self._load_tokens: Counter[Priority] = Counter()
        self.on_available: Callable[[], None] = lambda: None
        self._connection = 0
        client.subscribe(self)

    @property
    def is_available(self) -> bool:
        return self.is_member and self.client.problem is None

    @property
    def problem(self) -> str | None:
        return self.client.problem

    def add_load(self, priority: Priority, tokens: int, waiting: int) -> None:
        """So much more; less, if negative."""
        self._load_tokens[priority] += tokens
        self._waiting[priority] += waiting

    def waiting(self, priority: Priority) -> int:
        """Requests of that class without a first answer."""
        return self._waiting[priority]

    def view(self, priority: Priority, hashes: Sequence[bytes], block_tokens: int) -> RankView:
        """What one of that class meets here."""
        if self._connection != self.client.connections:  # a new process, with an empty cache
            self._connection = self.client.connections
            self.prefixes.clear()
        return RankView(
            name=self.client.name,
            load_tokens=sum(n for other, n in self._load_tokens.items() if other <= priority),
            prefix_tokens=self.prefixes.match(hashes) * block_tokens,
        )

    def on_state(self, state: RankState) -> None:
        if state.healthy:
            self.on_available()

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None: ...

    def on_lost(self, error: ChannelError) -> None:
        self._on_lost()


@dataclass(slots=True)
class _Assignment:
    """Of a request that has been sent. waits: nothing of it has come back from there."""

    rank: _Rank
    tokens: int
    waits: bool = True


Connect = Callable[[str, str], RankClient]
"""Name and client address of a rank → a client of it, not yet started."""


class LeastWorkPlacer:
    """The `placer.Placer` of attention ranks. choose: which of those that have room. find: where
    they are now, asked while one of them is missing, or where they come and go at all times.
    connect: a client of one that comes later; None: none does, and none goes."""

    kind = "attention rank"

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: RoutingConfig,
        choose: Choose = least_work,
        find: FindRanks | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.config = config
        self._ranks = [_Rank(client, self._on_lost) for client in clients]  # with those that go
        self._connect = connect
        self._discovery = RankDiscovery(
            self._ranks, find, self._on_addresses, poll_always=connect is not None
        )
        self._choose = choose
        self._on_available: Callable[[], None] = lambda: None
        self._assignments: dict[Ticket, _Assignment] = {}
        self._queued: dict[Priority, dict[Ticket, None]] = {priority: {} for priority in Priority}
        self._no_rank_timeout = NoRankTimeout(self, self._fail_all)

    @property
    def peers(self) -> list[_Rank]:
        """Of the ranks that there are."""
        return [rank for rank in self._ranks if rank.is_member]

    def subscribe(self, on_available: Callable[[], None]) -> None:
        self._on_available = on_available
        for rank in self._ranks:
            rank.on_available = self._on_rank_available

    def _on_rank_available(self) -> None:
        self._dispatch()
        self._on_available()

    def put(self, ticket: Ticket) -> None:
        queued = self._queued[ticket.submit.priority]
        rank = None if queued else self._choose_rank(ticket)
        if rank is not None:
            self._send(ticket, rank)
            return
        queued[ticket] = None
        self._update_no_rank_timeout()

    def record_answer(self, ticket: Ticket) -> None:
        assignment = self._assignments.get(ticket)
        if assignment is not None and assignment.waits:
            assignment.waits = False
            assignment.rank.add_load(ticket.submit.priority, 0, -1)
            self._dispatch()

    def remove(self, ticket: Ticket) -> None:
        priority = ticket.submit.priority
        self._queued[priority].pop(ticket, None)
        assignment = self._assignments.pop(ticket, None)
        if assignment is not None:
            assignment.rank.add_load(priority, -assignment.tokens, -assignment.waits)
            self._dispatch()

    async def close(self) -> None:
        self._no_rank_timeout.cancel()
        await self._discovery.close()
        for rank in self._ranks:
            if not rank.is_member:
                await rank.client.close()

    # ---- those that wait for a rank

    def _dispatch(self) -> None:
        """As many as there is room for, in the order in which they came."""
        self._discovery.ensure_polling()
        self._update_no_rank_timeout()
        for queued in self._queued.values():
            while queued and (rank := self._choose_rank(ticket := next(iter(queued)))) is not None:
                del queued[ticket]
                try:
                    self._send(ticket, rank)
                except TandemError as error:  # its own fault: the others go on
                    ticket.fail(error)

    def _update_no_rank_timeout(self) -> None:
        if any(self._queued.values()) and not any(rank.is_available for rank in self.peers):
            self._no_rank_timeout.start()
        else:
            self._no_rank_timeout.cancel()

    def _fail_all(self, error: NotReadyError) -> None:
        for queued in self._queued.values():
            for ticket in queued:
                ticket.fail(error)
            queued.clear()

    # ---- ranks

    def _send(self, ticket: Ticket, rank: _Rank) -> None:
        submit = ticket.submit
        tokens = submit.prompt_tokens + (submit.sampling.max_tokens if submit.sampling else 0)
        self._assignments[ticket] = _Assignment(rank, tokens)
        rank.add_load(submit.priority, tokens, 1)
        ticket.send(rank.client)
        rank.client.flush()

    def _choose_rank(self, ticket: Ticket) -> _Rank | None:
        """The rank for this request; None: none has room. One that waits for expert ranks, or that
        has failed it, is taken only where there is no other."""
        failed_clients, is_available = (
            ticket.failed_clients(),
            [rank for rank in self.peers if rank.is_available],
        )
        candidates = [rank for rank in is_available if not rank.client.waits] or is_available
        others = [rank for rank in candidates if rank.client not in failed_clients]
        priority, most = ticket.submit.priority, self.config.max_waiting
        free = [rank for rank in others or candidates if rank.waiting(priority) < most]
        if len(self.peers) == 1 or not free:
            return free[0] if free else None
        block_tokens = self.config.block_tokens
        hashes = ticket.hashes(block_tokens)
        by_name = {rank.client.name: rank for rank in free}
        views = [rank.view(priority, hashes, block_tokens) for rank in free]
        chosen = by_name[self._choose(views).name]
        chosen.prefixes.add(hashes)
        return chosen

    def _on_addresses(self, addresses: Mapping[str, str]) -> None:
        """Where the ranks are now. One that is not named stays where it was, or goes."""
        named = {name: at for name, at in addresses.items() if name.startswith(_PREFIX)}
        for rank in list(self._ranks):
            if address := named.pop(rank.client.name, ""):
                self._update_address(rank, address)
            elif self._connect is not None and addresses:
                self._drain_rank(rank)
        for name, address in named.items():
            self._add_rank(name, address)

    def _update_address(self, rank: _Rank, address: str) -> None:
        if not rank.is_member and rank.client.address != address:
            self._remove_rank(rank)  # another one of its number
            self._add_rank(rank.client.name, address)
            return
        rank.is_member = True
        rank.client.set_address(address)

    def _add_rank(self, name: str, address: str) -> None:
        if self._connect is None:
            return
        client = self._connect(name, address)
        rank = _Rank(client, self._on_lost)
        rank.on_available = self._on_rank_available
        self._ranks.append(rank)
        client.start()
        event(log, "worker_joined", name=client.name)

    def _drain_rank(self, rank: _Rank) -> None:
        """It ends what it has, or hands it over."""
        if rank.is_member:
            rank.is_member = False
            event(log, "worker_draining", name=rank.client.name)
        if not rank.client.has_open:
            self._remove_rank(rank)

    def _remove_rank(self, rank: _Rank) -> None:
        self._ranks.remove(rank)
        rank.client.disconnect()

    def _on_lost(self) -> None:
        self._update_no_rank_timeout()
        self._discovery.poll()
