"""So that many at once do not keep an event loop from others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping

import msgspec

from cluster.routing.admission_controller import AdmissionController
from cluster.routing.placer import Placer, problems, wait_peer_ready
from cluster.routing.rank_client import RankClient, smallest_pool_tokens
from cluster.routing.ticket import Ticket, failure_of
from contracts.clock import Clock, monotonic_s
from contracts.errors import (
    HandedOverError,
    NotReadyError,
    PeerDeadError,
    PeerHungError,
    TandemError,
)
from contracts.logs import event
from contracts.messages import Failed, Finished, Scored, Submit, Tokens


class LoopThrottle:
    """At most `per_turn` go on in one turn of the event loop, in the order in which they came."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._remaining = per_turn
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._refilling = False

    async def acquire(self) -> None:
        """Returns when it is one's turn: at once while there is little to do."""
        loop = asyncio.get_running_loop()
        if not self._refilling:
            self._refilling = True
            loop.call_soon(self._refill)
        if self._remaining and not self._waiters:
            self._remaining -= 1
            return
        waiter = loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _refill(self) -> None:
        """In every turn of the loop, until nobody has come in one."""
        self._refilling = bool(self._waiters) or self._remaining < self._per_turn
        self._remaining = self._per_turn
        while self._waiters and self._remaining:
            waiter = self._waiters.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)
                self._remaining -= 1
        if self._refilling:
            asyncio.get_running_loop().call_soon(self._refill)


log = logging.getLogger("tandem.admission")

STARTS_PER_TURN = 8  # later sequences of large requests, in a turn of the loop: about a millisecond


class PipelineBackend:
    """A backend of the API. Owns the clients of its placer's ranks; use on one event loop."""

    def __init__(self, placer: Placer, clock: Clock = monotonic_s) -> None:
        self._placer = placer
        self._config = placer.config
        self._open: set[Ticket] = set()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._throttle = LoopThrottle(STARTS_PER_TURN)
        self._controller = AdmissionController(self._slots, placer.config, clock)
        placer.subscribe(self._controller.grant_slots)

    # ---- life

    @property
    def clients(self) -> list[RankClient]:
        return [peer.client for peer in self._placer.peers]

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def close(self) -> None:
        await self._placer.close()
        for ticket in self._open:
            ticket.fail(NotReadyError("this ingress is shutting down"))
        for client in self.clients:
            await client.close()

    async def wait_ready(self) -> None:
        """Returns once every rank takes requests."""
        for peer in self._placer.peers:
            await wait_peer_ready(peer)

    @property
    def is_serving(self) -> bool:
        """Whether any rank takes requests."""
        return any(peer.problem is None for peer in self._placer.peers)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        """What the smallest rank's KV pool holds; None: no rank has told."""
        return smallest_pool_tokens(self.clients, self._config.block_tokens)

    def problems(self) -> list[str]:
        """One line per rank that takes no requests now; empty: ready."""
        return problems(self._placer.peers)

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Requests that wait for a first answer, by (pipeline, class)."""
        return self._waiting

    # ---- requests

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        """The answer of a prefill-only job. Raises TandemError; cancelling cancels the job.

        Where all queues are full it raises OverloadError, or if `wait_for_slot` waits for its turn:
        for the later sequences of a client whose first one was let in.
        """
        ticket = await self._admit(submit, wait_for_slot)
        try:
            answer = (await ticket.next_batch())[-1]
        finally:
            self._close_ticket(ticket)
        if isinstance(answer, Scored):
            return answer
        raise failure_of(answer)

    async def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Events as they arrive, batch by batch; the last one is a `Finished`. Raises TandemError.
        Closing it (or cancelling the task that iterates) cancels the request. patient: as in
        `score`."""
        ticket = await self._admit(submit, wait_for_slot)
        try:
            while True:
                batch = await ticket.next_batch()
                self._on_answer(ticket)
                results = [event for event in batch if isinstance(event, Tokens | Finished)]
                if results:
                    yield results
                last = batch[-1]
                if isinstance(last, Finished):
                    return
                if not isinstance(last, Tokens):
                    raise failure_of(last)
        finally:
            self._close_ticket(ticket)

    async def _admit(self, submit: Submit, wait_for_slot: bool) -> Ticket:
        """Raises OverloadError, unless patient."""
        if wait_for_slot:  # it belongs to a request that was let in: it waits with the others
            await self._controller.acquire(submit)
            await self._throttle_start(submit)
        else:
            self._controller.acquire_nowait(submit)
        ticket = Ticket(submit, wait_for_slot=wait_for_slot, on_lost=self._retry, clock=self._clock)
        self._open.add(ticket)
        self._waiting[ticket.kind] += 1
        try:
            self._placer.put(ticket)
        except BaseException:
            self._close_ticket(ticket)
            raise
        return ticket

    async def _throttle_start(self, submit: Submit) -> None:
        """Its hashes and its message are made in the loop, as those of all others are."""
        try:
            await self._throttle.acquire()
        except BaseException:
            self._controller.release(submit, wait_for_slot=True)
            raise

    def _retry(self, ticket: Ticket, cause: Failed) -> None:
        """Its rank is lost, or says that it cannot work: another one runs it, or goes on with it,
        once there is one."""
        self._placer.remove(ticket)
        is_rank_fault = not _is_handed_over(ticket, cause) and not _was_waiting(ticket, cause)
        is_new, has_others = ticket.record_failure(cause), self._has_untried_rank(ticket)
        counts = is_rank_fault and (is_new or not has_others)  # once while there are others
        ticket.count_failure(counts=counts, attempt_reset_tokens=self._config.attempt_reset_tokens)
        if not ticket.resume():
            return
        if ticket.attempts >= self._config.max_attempts:
            ticket.fail(self._attempts_exhausted(ticket, cause))
            return
        try:
            self._placer.put(ticket)
        except TandemError as error:
            ticket.fail(error)

    def _has_untried_rank(self, ticket: Ticket) -> bool:
        failed_clients = ticket.failed_clients()
        return any(
            peer.is_available for peer in self._placer.peers if peer.client not in failed_clients
        )

    def _attempts_exhausted(self, ticket: Ticket, last: Failed) -> Failed:
        attempts, reason = ticket.attempts, last.message
        event(log, "request_abandoned", logging.ERROR, attempts=attempts, reason=reason)
        message = f"{attempts} {self._placer.kind}s were lost with this request; last: {reason}"
        return msgspec.structs.replace(last, message=message)

    def _close_ticket(self, ticket: Ticket) -> None:
        """It is answered, or nobody waits for it any more."""
        self._on_answer(ticket)
        ticket.cancel()
        self._open.discard(ticket)
        self._placer.remove(ticket)

    def _on_answer(self, ticket: Ticket) -> None:
        """Something has come back, or nothing will. May be called again."""
        self._placer.record_answer(ticket)
        if ticket.waits:
            ticket.waits = False
            self._waiting[ticket.kind] -= 1
            self._controller.release(ticket.submit, wait_for_slot=ticket.wait_for_slot)

    # ---- slots

    @property
    def _available_ranks(self) -> int:
        return sum(peer.is_available for peer in self._placer.peers)

    def _slots(self) -> int:
        """Of each class. Without a rank as many as one has: they wait for the next."""
        return self._config.max_waiting * max(1, self._available_ranks)


def _is_handed_over(ticket: Ticket, cause: Failed) -> bool:
    """Whether its rank leaves, and has not failed: one that hands over and stays has."""
    client = ticket.client
    return cause.code == HandedOverError.code and client is not None and client.is_leaving


def _was_waiting(ticket: Ticket, cause: Failed) -> bool:
    """Whether its rank was lost without expert ranks: nothing was computed that might have ended
    it."""
    is_gone = cause.code in (PeerDeadError.code, PeerHungError.code)
    return is_gone and ticket.client is not None and ticket.client.waits
