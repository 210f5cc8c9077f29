"""Which rank runs a request, and when: what an `admission.Admission` asks of whoever decides it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cluster.routing.rank_client import RankClient
from cluster.routing.ticket import Ticket
from contracts.errors import NotReadyError


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """block_tokens: as in the ranks' prefix caches. max_waiting: sequences per rank and class of
    which no answer has come back yet. request_share: of those, what one request may hold while
    others are there. ls_max_wait_s, be_max_wait_s, be_share: as in the section `priority` of the
    configuration. max_attempts: how many ranks (or incarnations of one) may fail with a request
    before it counts as what ends them. forgiving_tokens: once it has given so many more, those that
    failed before count no longer. alone_s: how long requests wait while there is no rank at all."""

    block_tokens: int = 16
    max_waiting: int = 1024
    request_share: float = 0.25
    ls_max_wait_s: float = 10.0
    be_max_wait_s: float = 300.0
    be_share: float = 0.1
    max_attempts: int = 3
    attempt_reset_tokens: int = 16
    no_rank_timeout_s: float = 60.0


class Peer(Protocol):
    """A rank, as the ingress knows it. present: it can be given requests. problem: why it takes
    none now, or None."""

    client: RankClient

    @property
    def is_available(self) -> bool: ...

    @property
    def problem(self) -> str | None: ...


class Placer(Protocol):
    """kind: of its ranks, in words. Requests wait for a rank while there is none that could run
    them: for alone_s, if there is none at all."""

    kind: str
    config: RoutingConfig

    @property
    def peers(self) -> Sequence[Peer]: ...

    def subscribe(self, on_available: Callable[[], None]) -> None:
        """Before `start`. on_present: to be called when a rank is there that was not."""

    def put(self, ticket: Ticket) -> None:
        """Sends the request to a rank, now or later, rather to none of `ticket.failed_clients()`.
        Raises what `Ticket.send` does."""

    def record_answer(self, ticket: Ticket) -> None:
        """Something of it has come back. May be called again."""

    def remove(self, ticket: Ticket) -> None:
        """Off the books. Without effect for what is not on them."""

    async def close(self) -> None:
        """Before the clients are closed."""


def problems(peers: Sequence[Peer]) -> list[str]:
    """One line per rank that takes no requests now; empty: ready."""
    found = (peer.problem for peer in peers)
    return [problem for problem in found if problem is not None]


async def wait_peer_ready(peer: Peer) -> None:
    """Returns once it takes requests."""
    await peer.client.wait_until(lambda _: peer.problem is None)


class NoRankTimeout:
    """How long requests wait while there is no rank at all: after alone_s, `fail_requests` is
    called with what they are told."""

    def __init__(self, placer: Placer, fail_requests: Callable[[NotReadyError], None]) -> None:
        self._placer, self._fail_requests = placer, fail_requests
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Without effect if it has begun."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._placer.config.no_rank_timeout_s, self._on_timeout)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer, placer = None, self._placer
        found = "; ".join(problems(placer.peers))
        self._fail_requests(
            NotReadyError(f"no {placer.kind} for {placer.config.no_rank_timeout_s:g} s: {found}")
        )
