"""The API's backend: admission and lifecycle of requests, for one pipeline and for both.

Requests that one pass answers (no sampling, or at most one token) run on prefill workers, other
generations on attention ranks. If only one kind is deployed, it runs all requests.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from cluster.routing.admission_controller import AdmissionController
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import Placer
from cluster.routing.ticket import Ticket, failure_of
from contracts.clock import monotonic_s
from contracts.errors import (
    HandedOverError,
    NotReadyError,
    PeerDeadError,
    PeerHungError,
    TandemError,
)
from contracts.logs import event
from contracts.messages import Failed, Finished, Scored, Submit, Tokens

STARTS_PER_TURN = 8  # of later sequences, per turn of the event loop: about 1 ms
POLL_S = 0.1


class LoopThrottle:
    """Limit of starts per turn of the event loop, in order of arrival."""

    def __init__(self, per_turn: int) -> None:
        self._starts = asyncio.Semaphore(per_turn)

    async def acquire(self) -> None:
        """Return when the caller may start: at once while few callers arrive."""
        await self._starts.acquire()
        asyncio.get_running_loop().call_soon(self._starts.release)  # in the next turn


log = logging.getLogger("tandem.admission")


class PipelineBackend:
    """`Backend` of one pipeline. Owns its ranks' clients; belongs to one event loop."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._ranks = placer.ranks
        self._config = placer.config
        self._open: set[Ticket] = set()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._throttle = LoopThrottle(STARTS_PER_TURN)
        self._controller = AdmissionController(self._slots, placer.config, monotonic_s)
        self._ranks.on_available = self._controller.grant_slots

    # ---- lifecycle

    @property
    def clients(self) -> list[RankClient]:
        return self._ranks.clients

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def close(self) -> None:
        for ticket in self._open:
            ticket.fail(NotReadyError("this ingress is shutting down"))
        await self._ranks.close()

    async def wait_ready(self) -> None:
        await self._ranks.wait_ready()

    @property
    def is_serving(self) -> bool:
        return any(member.problem is None for member in self._ranks)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        states = (client.state for client in self.clients)
        blocks = [state.total_blocks for state in states if state and state.total_blocks]
        return min(blocks) * self._config.block_tokens if blocks else None

    def problems(self) -> list[str]:
        return self._ranks.problems()

    def waiting(self) -> Mapping[tuple[str, str], int]:
        return self._waiting

    # ---- requests

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
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
        if wait_for_slot:
            await self._controller.acquire(submit)
            try:  # bound how many requests are hashed and encoded in one turn of the loop
                await self._throttle.acquire()
            except BaseException:
                self._controller.release(submit, wait_for_slot=True)
                raise
        else:
            self._controller.acquire_nowait(submit)
        ticket = Ticket(submit, wait_for_slot=wait_for_slot, on_lost=self._retry)
        self._open.add(ticket)
        self._waiting[ticket.kind] += 1
        try:
            self._placer.put(ticket)
        except BaseException:
            self._close_ticket(ticket)
            raise
        return ticket

    def _retry(self, ticket: Ticket, cause: Failed) -> None:
        """Handle the loss or failure of the request's rank: another rank runs or resumes it."""
        self._placer.remove(ticket)
        is_rank_fault = not _is_handed_over(ticket, cause) and not _was_waiting(ticket, cause)
        is_new, has_others = ticket.record_failure(), self._has_untried_rank(ticket)
        counts = is_rank_fault and (is_new or not has_others)  # once per rank while others remain
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
        return any(member.client not in failed_clients for member in self._ranks.available)

    def _attempts_exhausted(self, ticket: Ticket, last: Failed) -> Failed:
        attempts, reason = ticket.attempts, last.message
        event(log, "request_abandoned", logging.ERROR, attempts=attempts, reason=reason)
        message = f"{attempts} {self._ranks.kind}s were lost with this request; last: {reason}"
        return msgspec.structs.replace(last, message=message)

    def _close_ticket(self, ticket: Ticket) -> None:
        self._on_answer(ticket)
        ticket.cancel()
        self._open.discard(ticket)
        self._placer.remove(ticket)

    def _on_answer(self, ticket: Ticket) -> None:
        """Release the slot: part of the answer has arrived, or none will. May be called again."""
        self._placer.record_answer(ticket)
        if ticket.awaits_first_event:
            ticket.awaits_first_event = False
            self._waiting[ticket.kind] -= 1
            self._controller.release(ticket.submit, wait_for_slot=ticket.wait_for_slot)

    # ---- slots

    def _slots(self) -> int:
        """Return the slots of each class. Without a rank, requests wait for the next one."""
        return self._config.max_waiting * max(1, len(self._ranks.available))


def _is_handed_over(ticket: Ticket, cause: Failed) -> bool:
    """Return whether the rank drains. A rank that hands requests over and stays has failed."""
    client = ticket.client
    return cause.code == HandedOverError.code and client is not None and client.is_leaving


def _was_waiting(ticket: Ticket, cause: Failed) -> bool:
    """Return whether the rank was lost while it waited for expert ranks: it computed nothing."""
    is_gone = cause.code in (PeerDeadError.code, PeerHungError.code)
    return is_gone and ticket.client is not None and ticket.client.waits


class Backend(Protocol):
    """Runs requests: `Pipelines`, or a `PipelineBackend`."""

    def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        """Yield batches of events, a `Finished` last. Closing it cancels. Raises TandemError.

        wait_for_slot: wait for a slot instead of raising OverloadError: for later sequences of a
        client's request whose first one was admitted.
        """

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        """Return a prefill-only request's answer. Cancelling cancels it. Raises TandemError."""

    def pool_tokens(self, *, prefill: bool) -> int | None:
        """Return the capacity of the smallest KV pool that may receive the request; None: unknown.

        prefill: the request generates at most one token.
        """

    def problems(self) -> list[str]:
        """Return one line per rank that accepts no requests; empty: ready."""

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Return the sequences that wait for a first answer, by (pipeline, class)."""


class Pipelines:
    """Backend of the API. Requires at least one of the two pipelines."""

    def __init__(
        self, generating: PipelineBackend | None, prefilling: PipelineBackend | None
    ) -> None:
        both = (generating, prefilling)
        self._deployed = [backend for backend in both if backend is not None]
        if not self._deployed:
            raise ValueError("neither attention ranks nor prefill workers")
        self._generating = self._deployed[0]
        self._prefilling = self._deployed[-1]

    def start(self) -> None:
        for backend in self._deployed:
            backend.start()

    async def close(self) -> None:
        for backend in self._deployed:
            await backend.close()

    async def wait_ready(self) -> None:
        await asyncio.gather(*(backend.wait_ready() for backend in self._deployed))

    async def wait_serving(self, all_ready_timeout_s: float) -> None:
        """Return once every rank accepts requests; after the timeout, one per pipeline suffices."""
        try:
            async with asyncio.timeout(all_ready_timeout_s):
                await self.wait_ready()
        except TimeoutError:
            while not all(backend.is_serving for backend in self._deployed):
                await asyncio.sleep(POLL_S)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        return (self._prefilling if prefill else self._generating).pool_tokens(prefill=prefill)

    def problems(self) -> list[str]:
        return [problem for backend in self._deployed for problem in backend.problems()]

    def waiting(self) -> Mapping[tuple[str, str], int]:
        total: Counter[tuple[str, str]] = Counter()
        for backend in self._deployed:
            total.update(backend.waiting())
        return total

    def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        backend = self._prefilling if submit.prefill_only else self._generating
        return backend.generate(submit, wait_for_slot=wait_for_slot)

    def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Coroutine[Any, Any, Scored]:
        return self._prefilling.score(submit, wait_for_slot=wait_for_slot)
