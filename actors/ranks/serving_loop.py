"""The loop of ranks that serve clients: takes sequences, batches them, runs them, answers.

    clients ──> admit ──> Scheduler ──> form a batch ──> Executor ──> Finisher ──> clients

Its threads: this one (everything with tensors), the clients' I/O, and what moves data for the
executor's plane. What a kind of rank has more, its observers do.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence as TokenSequence
from actors.batching.sequence_errors import failed, failed_by
from actors.ranks.batching_view import View
from actors.ranks.leaving import Leaving
from actors.ranks.serving_parts import Intake, ServingParts
from actors.wire.client_server import FromClient
from contracts.clock import monotonic_s
from contracts.errors import (
    ChannelError,
    HandedOverError,
    NotReadyError,
    PeerError,
    TandemError,
)
from contracts.logs import event
from contracts.messages import Cancel, Event, Events, RankState, Submit
from contracts.requests import Priority

log = logging.getLogger("tandem.worker")

IDLE_POLL_S = 0.1
CHECK_AFTER_S = 10.0  # so long after the last request that none is likely to wait for it


class ServingLoop:
    """A `Loop` of a `Rank`."""

    def __init__(self, name: str, intake: Intake, parts: ServingParts) -> None:
        self._name = name
        self._clients, self._admission, self._block_tokens = intake
        self._watch = parts.watch
        self.executor = parts.executor
        self.finisher = parts.finisher
        self._plan_of = parts.plan_of
        self._close_links = parts.close
        self._leaving = Leaving(name, monotonic_s)
        self._observers = [*parts.observers, self._leaving]
        self._batching = parts.batching
        self._view = View(parts.scheduler, parts.executor)
        self.scheduler = parts.scheduler
        self.scheduler.drop_best_effort = self._drop_best_effort
        self.reason = ""  # why this rank cannot serve; empty: it can
        self._is_leaving = self._waits = False
        self._busy_s: float | None = None  # when there was last a request, unless checked since
        self._computed_tokens = 0
        self._nothing_to_form = -1  # at that many changes

    # ---- as a rank's loop

    @property
    def problem(self) -> str:
        return self.reason or self._watch.problem

    def run(self, stopping: threading.Event) -> None:
        self.tell_state()
        for observer in self._observers:
            observer.begin(self)
        while not stopping.is_set():
            self._turn()
        self.say_leaving()
        self.hand_over()

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """Answers what comes in after a failure: nobody waits for a loop that has ended."""
        self.reason = reason
        self.tell_state()  # first: what fails here is not to be sent here again
        self._fail_everything(NotReadyError(reason))
        self._close_links()
        while not stopping.wait(IDLE_POLL_S):
            self._watch.moved()
            self._receive()

    def wake(self) -> None:
        self.executor.wake()

    def leave(self, within_s: float) -> None:
        self._leaving.leave(within_s)

    @property
    def left(self) -> threading.Event:
        return self._leaving.left

    def close(self) -> None:
        try:
            self._clients.close()
        finally:
            self._close_links()

    @property
    def load(self) -> tuple[int, int]:
        return self.scheduler.running, self.scheduler.waiting

    def sections(self) -> dict[str, dict[str, float]]:
        """totals: computed_tokens are those that batches have run; those from the prefix cache are
        not among them."""
        blocks = self.scheduler.blocks
        found: dict[str, dict[str, float]] = {
            "kv_blocks": dict(blocks.counts),
            "totals": {
                "computed_tokens": self._computed_tokens,
                "requeued": self.scheduler.requeued_total,
                "kv_evictions": blocks.evicted_total,
            },
        }
        for observer in self._observers:
            for name, numbers in observer.sections().items():
                found[name] = found.get(name, {}) | numbers
        return found

    def notes(self) -> dict[str, str]:
        return {name: note for o in self._observers for name, note in o.notes().items()}

    # ---- what observers may ask for

    def admit(self, client: int, submit: Submit) -> None:
        try:
            if self.reason:
                raise NotReadyError(self.reason)
            if self._is_leaving:
                raise HandedOverError(f"{self._name} leaves")
            self._admission.check(client, submit, self.scheduler)
            for observer in self._observers:
                observer.check(client, submit)
            sequence = TokenSequence((client, submit.request_id), submit, self._block_tokens)
            _ = sequence.hashes  # now: nobody should wait for them in the middle of a batch
            for observer in self._observers:
                observer.accepted(sequence)
            self.scheduler.add(sequence)
        except Exception as error:  # noqa: BLE001 - of this sequence alone
            self.send(client, [failed_by(submit, error, TandemError)])

    def send_answers(self) -> None:
        answers, self.finisher.answers = self.finisher.answers, []
        by_client: defaultdict[int, list[Event]] = defaultdict(list)
        for sequence, answer in answers:
            by_client[sequence.key[0]].append(answer)
        for observer in self._observers:
            observer.answers(by_client)
        for client, events in by_client.items():
            self.send(client, events)

    def send(self, client: int, events: list[Event]) -> None:
        self._clients.send(client, Events(events))

    def tell_state(self) -> None:
        state = RankState(
            rank=self._name,
            healthy=not self.reason,
            reason=self.reason,
            total_blocks=self.scheduler.blocks.num_blocks,
            leaving=self._is_leaving,
            waits=self._waits,
        )
        self._clients.publish(state)

    def say_leaving(self) -> None:
        self._is_leaving = True
        self.tell_state()

    def say_waits(self, waits: bool) -> None:
        self._waits = waits
        self.tell_state()

    def hand_over(self) -> None:
        """After `say_leaving`, without which it would all be sent here again."""
        self._fail_everything(HandedOverError(f"{self._name} leaves"))

    def lose(self, error: ChannelError) -> None:
        """A peer is lost: every request on this rank ends with an error that names it."""
        self.reason = error.message
        event(log, "peer_lost", logging.ERROR, rank=self._name, reason=error.message)
        self.tell_state()  # first: what fails here is not to be sent here again
        self._fail_everything(error)

    # ---- a turn

    def _turn(self) -> None:
        self._watch.moved()
        self._receive()
        self._form_batches()
        for done in self._step():
            self._computed_tokens += done.tokens
            self.scheduler.complete(done)
            for observer in self._observers:
                observer.completed(done)
        for observer in self._observers:
            observer.stepped()
        if self.executor.failure is not None and not self.reason:
            self.lose(self.executor.failure)
        self.send_answers()
        self._check_when_idle()

    def _receive(self) -> None:
        for received in self._clients.receive():
            for observer in self._observers:
                observer.received(received)
            self._take(received)

    def _take(self, received: FromClient) -> None:
        client, message = received
        if message is None:
            for sequence in self.scheduler.sequences:
                if sequence.key[0] == client:
                    self.scheduler.cancel(sequence.key)
        elif isinstance(message, Cancel):
            self.scheduler.cancel((client, message.request_id))
        elif isinstance(message, Submit):
            self.admit(client, message)

    def _form_batches(self) -> None:
        """As many as the policy wants. It is not asked again until something has changed."""
        if self.scheduler.changes == self._nothing_to_form:
            return
        while not self.reason and not self.executor.is_engaged:
            batch = self._formed()
            if batch is None:
                self._nothing_to_form = self.scheduler.changes
                return
            plan = self._plan_of(batch)
            for observer in self._observers:
                observer.formed(batch)
            self.executor.submit(batch, plan)

    def _formed(self) -> ScheduledBatch | None:
        batches = map(self.scheduler.next_batch, self._batching(self._view))
        return next((batch for batch in batches if batch is not None), None)

    def _drop_best_effort(self) -> ScheduledBatch | None:
        """The BE batch that was formed last, for the blocks that it holds; None: there is none."""
        numbers = [live.number for live in self.executor.live if live.priority is Priority.BE]
        dropped = self.executor.drop(numbers[-1]) if numbers else None
        if dropped is not None:
            event(log, "batch_gave_way", rank=self._name, batch=dropped.number)
            for observer in self._observers:
                observer.dropped(dropped)
        return dropped

    def _step(self) -> list[ScheduledBatch]:
        """The batches that are complete now. What this process has no memory or descriptors to send
        ends the requests it has, not the rank."""
        try:
            return self.executor.step(IDLE_POLL_S)
        except PeerError:
            raise
        except ChannelError as error:
            event(log, "batch_not_sent", logging.ERROR, rank=self._name, reason=error)
            self._fail_everything(error)
            return []

    def _check_when_idle(self) -> None:
        """Holds the KV books against themselves once nothing has come for a while. It takes as long
        as a layer or more."""
        if len(self.scheduler):
            self._busy_s = monotonic_s()
        elif self._busy_s is not None and monotonic_s() - self._busy_s > CHECK_AFTER_S:
            self._busy_s = None
            self.scheduler.blocks.check([])

    def _fail_everything(self, error: TandemError) -> None:
        for batch in self.executor.fail_all():
            self.scheduler.abandon(batch)
            for observer in self._observers:
                observer.dropped(batch)
        for sequence in self.scheduler.sequences:
            if not sequence.done:
                self.finisher.answers.append((sequence, failed(sequence.submit.request_id, error)))
            self.scheduler.remove(sequence)
        self.send_answers()
