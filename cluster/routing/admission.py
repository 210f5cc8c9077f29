"""Requests in front of the ranks of one pipeline: who is let in, and what becomes of him.

    score, generate ─> Door ─> Ticket ─> Placer ─> RankClient ─> rank
                                 ▲  another rank, if  │
                                 └── this is lost  <──┴─> events, to their tickets

Everything happens on one event loop, and nothing of a request has a task of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

import msgspec

from cluster.routing.door import Door
from cluster.routing.paced import Paced
from cluster.routing.placer import Placer, problems, ready
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

log = logging.getLogger("tandem.admission")

STARTED_AT_ONCE = 8  # later sequences of large requests, in a turn of the loop: about a millisecond


class Admission:
    """A backend of the API. Owns the clients of its placer's ranks; use on one event loop."""

    def __init__(self, placer: Placer, clock: Clock = monotonic_s) -> None:
        self._placer = placer
        self._config = placer.config
        self._open: set[Ticket] = set()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._paced = Paced(STARTED_AT_ONCE)
        self._door = Door(self._slots, placer.config, clock)
        placer.listen(self._door.wake)

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
            await ready(peer)

    @property
    def serves(self) -> bool:
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

    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
        """The answer of a prefill-only job. Raises TandemError; cancelling cancels the job.

        Where all queues are full it raises OverloadError, or if `patient` waits for its turn: for
        the later sequences of a client whose first one was let in.
        """
        ticket = await self._admit(submit, patient)
        try:
            answer = (await ticket.next_batch())[-1]
        finally:
            self._leave(ticket)
        if isinstance(answer, Scored):
            return answer
        raise failure_of(answer)

    async def generate(
        self, submit: Submit, *, patient: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Events as they arrive, batch by batch; the last one is a `Finished`. Raises TandemError.
        Closing it (or cancelling the task that iterates) cancels the request. patient: as in
        `score`."""
        ticket = await self._admit(submit, patient)
        try:
            while True:
                batch = await ticket.next_batch()
                self._answered(ticket)
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

    async def _admit(self, submit: Submit, patient: bool) -> Ticket:
        """Raises OverloadError, unless patient."""
        if patient:  # it belongs to a request that was let in: it waits with the others
            await self._door.wait(submit)
            await self._start_in_turn(submit)
        else:
            self._door.enter(submit)
        ticket = Ticket(submit, patient=patient, lost=self._place_again, clock=self._clock)
        self._open.add(ticket)
        self._waiting[ticket.kind] += 1
        try:
            self._placer.put(ticket)
        except BaseException:
            self._leave(ticket)
            raise
        return ticket

    async def _start_in_turn(self, submit: Submit) -> None:
        """Its hashes and its message are made in the loop, as those of all others are."""
        try:
            await self._paced.turn()
        except BaseException:
            self._door.leave(submit, patient=True)
            raise

    def _place_again(self, ticket: Ticket, cause: Failed) -> None:
        """Its rank is lost, or says that it cannot work: another one runs it, or goes on with it,
        once there is one."""
        self._placer.remove(ticket)
        is_its_own = not _is_handed_over(ticket, cause) and not _waited(ticket, cause)
        is_new, has_others = ticket.note_failure(cause), self._has_others(ticket)
        counts = is_its_own and (is_new or not has_others)  # once while there are others
        ticket.count_failure(counts=counts, forgiving_tokens=self._config.forgiving_tokens)
        if not ticket.go_on():
            return
        if ticket.attempts >= self._config.max_attempts:
            ticket.fail(self._given_up(ticket, cause))
            return
        try:
            self._placer.put(ticket)
        except TandemError as error:
            ticket.fail(error)

    def _has_others(self, ticket: Ticket) -> bool:
        tried = ticket.tried()
        return any(peer.present for peer in self._placer.peers if peer.client not in tried)

    def _given_up(self, ticket: Ticket, last: Failed) -> Failed:
        attempts, reason = ticket.attempts, last.message
        event(log, "request_given_up", logging.ERROR, attempts=attempts, reason=reason)
        told = f"{attempts} {self._placer.kind}s were lost with this request; last: {reason}"
        return msgspec.structs.replace(last, message=told)

    def _leave(self, ticket: Ticket) -> None:
        """It is answered, or nobody waits for it any more."""
        self._answered(ticket)
        ticket.cancel()
        self._open.discard(ticket)
        self._placer.remove(ticket)

    def _answered(self, ticket: Ticket) -> None:
        """Something has come back, or nothing will. May be called again."""
        self._placer.answered(ticket)
        if ticket.waits:
            ticket.waits = False
            self._waiting[ticket.kind] -= 1
            self._door.leave(ticket.submit, patient=ticket.patient)

    # ---- slots

    @property
    def _present(self) -> int:
        return sum(peer.present for peer in self._placer.peers)

    def _slots(self) -> int:
        """Of each class. Without a rank as many as one has: they wait for the next."""
        return self._config.max_waiting * max(1, self._present)


def _is_handed_over(ticket: Ticket, cause: Failed) -> bool:
    """Whether its rank leaves, and has not failed: one that hands over and stays has."""
    client = ticket.client
    return cause.code == HandedOverError.code and client is not None and client.is_leaving


def _waited(ticket: Ticket, cause: Failed) -> bool:
    """Whether its rank was lost without expert ranks: nothing was computed that might have ended
    it."""
    is_gone = cause.code in (PeerDeadError.code, PeerHungError.code)
    return is_gone and ticket.client is not None and ticket.client.waits
