"""The router of prefill-only requests at work: sockets and waiting around
`planner/routing/router.py`.

    score, generate ─> Ticket ─> Backlog ─ take ─> RankClient ─> prefill worker
                                   ▲                  │ log: reports, snapshots
                                   └──── Router <─────┘ then the answers, to their tickets

Everything happens on one event loop, and nothing of a request has a task of its own. A request
whose worker is lost goes to another one: it is idempotent as long as nothing has come back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from cluster.routing.prefill_peer import Find, Finder, PrefillPeer
from cluster.routing.rank_client import RankClient, smallest_pool_tokens
from cluster.routing.room import Room
from cluster.routing.ticket import Ticket, class_of, failure_of, lane_of
from contracts.clock import Clock, monotonic_s
from contracts.errors import NotReadyError, OverloadError, PeerDeadError, TooCostlyError
from contracts.logs import event
from contracts.messages import Finished, Scored, Submit, Tokens
from contracts.routing import Prompt, RequestKey
from planner.routing.backlog import Backlog
from planner.routing.request_work import RequestWork
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig

log = logging.getLogger("tandem.prefill_router")

ROUTER_BITS = 63


class PrefillRouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """max_waiting: requests per worker that have no answer yet. request_share: of those places,
    what one client request may hold while others wait. max_attempts: how many workers (or
    incarnations of one) may fail with a request before it counts as what ends them. alone_s: how
    long requests wait while there is no worker at all. number: of this router among all, None: a
    random one."""

    saturation: SaturationConfig
    block_tokens: int = 16
    max_waiting: int = 1024
    request_share: float = 0.25
    max_attempts: int = 3
    alone_s: float = 60.0
    number: int | None = None


class PrefillRouter:
    """The API's backend in front of prefill workers, in the order of their ranks.

    find: where the workers are now, asked while one of them is missing. Use on one event loop.
    """

    def __init__(
        self,
        clients: Sequence[RankClient],
        config: PrefillRouterConfig,
        work: RequestWork,
        find: Find | None = None,
        clock: Clock = monotonic_s,
    ) -> None:
        self.number = secrets.randbits(ROUTER_BITS) if config.number is None else config.number
        self._config = config
        settings = RouterConfig(
            workers=len(clients),
            saturation=config.saturation,
            number=self.number,
            block_tokens=config.block_tokens,
        )
        self._router = Router(settings, work)
        self._backlog = Backlog(self._router, work)
        self._peers = [
            PrefillPeer(index, client, self._router, self._on_change, self._on_lost)
            for index, client in enumerate(clients)
        ]
        self._finder = Finder(self._peers, find)
        self._tickets: dict[RequestKey, Ticket] = {}
        self._numbers = itertools.count()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._room = Room(self._places, config.request_share, clock)
        self._dispatching = False
        self._alone: asyncio.TimerHandle | None = None

    # ---- life

    @property
    def clients(self) -> list[RankClient]:
        return [peer.client for peer in self._peers]

    def start(self) -> None:
        for peer in self._peers:
            peer.client.start()

    async def close(self) -> None:
        await self._finder.close()
        self._stop_waiting_alone()
        for peer in self._peers:
            await peer.client.close()
        for ticket in list(self._tickets.values()):
            ticket.fail(NotReadyError("this ingress is shutting down"))

    async def wait_ready(self) -> None:
        """Returns once every worker takes requests."""
        for peer in self._peers:
            await peer.wait_ready()

    @property
    def serves(self) -> bool:
        """Whether any worker takes requests."""
        return any(peer.problem is None for peer in self._peers)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        """What the smallest rank's KV pool holds; None: no rank has told."""
        return smallest_pool_tokens(self.clients, self._config.block_tokens)

    def problems(self) -> list[str]:
        """One line per worker that takes no requests now; empty: ready."""
        return [peer.problem for peer in self._peers if peer.problem is not None]

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Requests that wait for a first answer, by (pipeline, class)."""
        return self._waiting

    def load(self, worker: int) -> int:
        """Work of the open requests there, as this router knows it."""
        return self._router.load(worker)

    # ---- requests

    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
        """The answer of a prefill-only job. Raises TandemError; cancelling cancels the job.

        Where all queues are full it raises OverloadError, or if `patient` waits for room: for the
        later sequences of a client whose first one was let in.
        """
        ticket = await self._admit(submit, patient)
        try:
            (event,) = await ticket.next_batch()
        finally:
            self._leave(ticket)
        if isinstance(event, Scored):
            return event
        raise failure_of(event)

    async def generate(
        self, submit: Submit, *, patient: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Events as they arrive, batch by batch; the last one is a `Finished`. Raises TandemError.
        Closing it cancels the request. patient: as in `score`."""
        ticket = await self._admit(submit, patient)
        try:
            while True:
                batch = await ticket.next_batch()
                self._no_longer_waiting(ticket)
                good = [event for event in batch if isinstance(event, Tokens | Finished)]
                if good:
                    yield good
                last = batch[-1]
                if isinstance(last, Finished):
                    return
                if not isinstance(last, Tokens):
                    raise failure_of(last)
        finally:
            self._leave(ticket)

    # ---- admission

    async def _admit(self, submit: Submit, patient: bool) -> Ticket:
        """Raises NotReadyError or OverloadError unless patient."""
        if patient:  # it belongs to a request that was let in: it waits with the others
            await self._room.wait(submit.caller)
        elif not self._present or not self._room.enter(submit.caller):
            raise self._refusal()
        hashes = tuple(submit.block_hashes(self._config.block_tokens))
        ticket = Ticket(submit, hashes, lane_of(submit, patient=patient), self._reroute)
        self._waiting[class_of(submit)] += 1
        if self._line_up(ticket):  # of many that come at once: a worker need not wait for the last
            self._dispatch()
            for peer in self._peers:
                peer.client.flush()
        return ticket

    @property
    def _present(self) -> int:
        return sum(peer.present for peer in self._peers)

    def _places(self) -> int:
        return self._config.max_waiting * max(1, self._present)

    def _refusal(self) -> NotReadyError | OverloadError:
        present, limit, wait_s = self._present, self._config.max_waiting, self._room.retry_after_s
        if not present:
            return NotReadyError(f"no prefill worker takes requests: {'; '.join(self.problems())}")
        return OverloadError(
            f"{limit} requests wait for each of {present} prefill workers (schedule.max_waiting):"
            f" try again in {math.ceil(wait_s)} s",
            wait_s,
        )

    # ---- a request's way

    def _line_up(self, ticket: Ticket) -> bool:
        """Into the backlog, under a new key: the log of a worker that has lost it names the old.
        Returns whether that makes a full batch for a worker that has none."""
        key = RequestKey(self.number, next(self._numbers))
        ticket.prompt = Prompt(key, len(ticket.submit.token_ids), ticket.hashes)
        ticket.worker = None
        self._tickets[key] = ticket
        full = self._backlog.put(
            ticket.prompt,
            ticket.lane,
            ticket.submit.token_ids,
            ticket.submit.caller,
            self._failed_on(ticket),
        )
        self._on_change()
        return full

    def _reroute(self, ticket: Ticket, reason: str) -> None:
        """Its worker is lost, or says that it cannot work."""
        self._forget(ticket)
        self._count_failure(ticket)
        if ticket.attempts < self._config.max_attempts:
            self._line_up(ticket)
            return
        event(log, "request_given_up", logging.ERROR, attempts=ticket.attempts, reason=reason)
        ticket.fail(
            PeerDeadError(
                f"{ticket.attempts} prefill workers were lost with this request; last: {reason}", ""
            )
        )

    def _count_failure(self, ticket: Ticket) -> None:
        """A worker counts once for each of its connections, until there is none but those."""
        worker, connection = ticket.worker, ticket.connection
        if worker is None:
            return  # it was not sent yet
        known = ticket.failed_on.pop(worker, None) == connection
        ticket.failed_on[worker] = connection
        tried = self._failed_on(ticket)
        others = any(peer.present for n, peer in enumerate(self._peers) if n not in tried)
        if not known or not others:
            ticket.attempts += 1

    def _failed_on(self, ticket: Ticket) -> tuple[int, ...]:
        """Workers that have failed it and have not begun anew since, the last one last."""
        return tuple(
            worker
            for worker, connection in ticket.failed_on.items()
            if self._peers[worker].client.connections == connection
        )

    def _forget(self, ticket: Ticket) -> None:
        """Off the books; without effect for what the worker's log speaks for."""
        assert ticket.prompt is not None
        key = ticket.prompt.key
        self._tickets.pop(key, None)
        if ticket.worker is None:
            self._backlog.remove(key)
        else:
            self._router.withdraw(key)

    def _leave(self, ticket: Ticket) -> None:
        """It is answered, or nobody waits for it any more."""
        if not ticket.ended and ticket.worker is not None:
            self._peers[ticket.worker].client.cancel(ticket.request_id)
        ticket.ended = True
        self._forget(ticket)
        self._no_longer_waiting(ticket)
        self._on_change()

    def _no_longer_waiting(self, ticket: Ticket) -> None:
        if ticket.counted:
            ticket.counted = False
            self._waiting[class_of(ticket.submit)] -= 1
            self._room.leave(ticket.submit.caller)

    # ---- dispatch

    def _on_change(self) -> None:
        """Requests may go now. Once for all that happens in one turn of the event loop."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        if len(self._backlog) == 0:
            self._stop_waiting_alone()
            return
        if not any(peer.present for peer in self._peers):
            self._wait_alone()
            return
        self._stop_waiting_alone()
        self._room.look()
        self._backlog.settle()
        for prompt, decision in self._backlog.take():
            ticket = self._tickets[prompt.key]
            ticket.worker = decision.worker
            ticket.connection = self._peers[decision.worker].client.connections
            placed = msgspec.structs.replace(ticket.submit, key=prompt.key)
            try:
                ticket.request_id = self._peers[decision.worker].client.post(placed, ticket)
            except TooCostlyError as error:  # its own fault: the others go on
                ticket.fail(error)

    def _on_lost(self, worker: int, *, for_good: bool) -> None:
        """Its requests hear of it themselves (`Ticket.lose`)."""
        self._router.lose(worker, for_good=for_good)
        self._backlog.lose(worker)
        self._finder.look()
        self._on_change()

    def _wait_alone(self) -> None:
        if self._alone is None:
            loop = asyncio.get_running_loop()
            self._alone = loop.call_later(self._config.alone_s, self._give_up)

    def _stop_waiting_alone(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def _give_up(self) -> None:
        self._alone = None
        error = NotReadyError(
            f"no prefill worker for {self._config.alone_s:g} s: {'; '.join(self.problems())}"
        )
        for ticket in list(self._tickets.values()):
            ticket.fail(error)
