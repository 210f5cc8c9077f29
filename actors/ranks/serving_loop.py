"""The loop of ranks with clients: receives sequences, batches and runs them, sends the answers.

    clients ──> admit ──> Scheduler ──> form a batch ──> Executor ──> Finisher ──> clients

Threads: this one (everything with tensors), the clients' I/O, the expert backend's transfers, and
grammars.
Observers add what differs between kinds of ranks.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from llguidance import LLTokenizer

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.finisher import Finisher
from actors.batching.grammar_matcher import GrammarMatchers
from actors.batching.observer import Observer
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence as TokenSequence
from actors.batching.sequence import failure_reply, logged_failure_reply
from actors.channels.heartbeat import LoopWatchdog
from actors.engine.executor import Executor
from actors.ranks.rank import RankDrain, RankLoop
from actors.rpc.client_server import ClientMessage, ClientServer
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandedOverError, NotReadyError, PeerError, TandemError
from contracts.logs import event
from contracts.messages import Cancel, Event, Events, RankState, Submit
from contracts.plan import Plan
from contracts.requests import Priority
from planner.scheduling.batching import (
    BatchingPolicy,
    LiveBatch,
    SequenceView,
    WaitingWork,
    one_at_a_time,
)

log = logging.getLogger("tandem.worker")

IDLE_POLL_S = 0.1
CHECK_AFTER_S = 10.0  # idle time before the integrity check


class ServingLoop(RankLoop):
    """Serves clients. tokenizer, vocabulary: of grammars."""

    def __init__(
        self,
        name: str,
        clients: ClientServer,
        parts: ServingParts,
        block_tokens: int,
        tokenizer: LLTokenizer | None,
        vocabulary: int,
    ) -> None:
        self._name, self._block_tokens, self._clients = name, block_tokens, clients
        self._compiled = threading.Event()  # since batches were last formed
        self._grammars = GrammarMatchers(tokenizer, vocabulary, self._on_compiled)
        self._watch = parts.watch
        self.executor = parts.executor
        self.finisher = parts.finisher
        self._plan_of = parts.plan_of
        self._close_links = parts.close
        self._drain = RankDrain(name, monotonic_s)
        self.drained = self._drain.drained
        self._observers = [*parts.observers, self._drain]
        self._batching = parts.batching
        self._view = SchedulerView(parts.scheduler, parts.executor)
        self.scheduler = parts.scheduler
        self.scheduler.drop_best_effort = self._drop_best_effort
        self.reason = ""  # why this rank cannot serve
        self._is_draining = self._waits = False
        self._busy_s: float | None = None  # time of the last request, unless checked since
        self._computed_tokens = 0
        self._idle_changes = -1  # scheduler changes at which no batch could be formed

    # ---- RankLoop

    @property
    def problem(self) -> str:
        return self.reason or self._watch.problem

    @torch.inference_mode()
    def run(self, stopping: threading.Event) -> None:
        self.publish_state()
        for observer in self._observers:
            observer.begin(self)
        while not stopping.is_set():
            self._turn()
        self.announce_drain()
        self.hand_over()

    def refuse(self, reason: str, stopping: threading.Event) -> None:
        """Answer requests after a failure, so that none waits."""
        self.reason = reason
        self.publish_state()  # first, so that failed requests are not sent here again
        self._fail_all(NotReadyError(reason))
        self._close_links()
        while not stopping.wait(IDLE_POLL_S):
            self._watch.record_progress()
            self._receive()

    def wake(self) -> None:
        self.executor.wake()

    def drain(self, within_s: float) -> None:
        self._drain.drain(within_s)

    def close(self) -> None:
        try:
            self._clients.close()
        finally:
            self._close_links()

    @property
    def load(self) -> tuple[int, int]:
        return self.scheduler.running, self.scheduler.waiting

    def sections(self) -> dict[str, dict[str, float]]:
        """totals: computed_tokens excludes tokens from the prefix cache."""
        blocks = self.scheduler.blocks
        found: dict[str, dict[str, float]] = {
            "kv_blocks": dict(blocks.counts),
            "totals": {
                "computed_tokens": self._computed_tokens,
                "requeued": self.scheduler.requeued_total,
                "kv_evictions": blocks.evicted_total,
            },
        }
        if blocks.states is not None:
            found["state_slots"] = dict(blocks.states.counts)
        for observer in self._observers:
            for name, numbers in observer.sections().items():
                found[name] = found.get(name, {}) | numbers
        return found

    def notes(self) -> dict[str, str]:
        return {name: note for o in self._observers for name, note in o.notes().items()}

    # ---- LoopControl, for observers

    def admit(self, client: int, submit: Submit) -> None:
        try:
            if self.reason:
                raise NotReadyError(self.reason)
            if self._is_draining:
                raise HandedOverError(f"{self._name} is draining")
            for observer in self._observers:
                observer.check(client, submit)
            sequence = TokenSequence((client, submit.request_id), submit, self._block_tokens)
            if submit.sampling is not None and submit.sampling.grammar is not None:
                assert sequence.logits_processor is not None
                generated = submit.token_ids[submit.prompt_tokens :]
                matcher = self._grammars.start(submit.sampling.grammar, generated)
                sequence.logits_processor.grammar = matcher
            _ = sequence.hashes  # computed now rather than within a batch
            for observer in self._observers:
                observer.accepted(sequence)
            self.scheduler.add(sequence)
        except Exception as error:  # noqa: BLE001 - fails this sequence only
            self.send(client, [logged_failure_reply(submit, error, TandemError)])

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

    def publish_state(self) -> None:
        state = RankState(
            rank=self._name,
            healthy=not self.reason,
            reason=self.reason,
            total_blocks=self.scheduler.blocks.num_blocks,
            leaving=self._is_draining,
            waits=self._waits,
        )
        self._clients.publish(state)

    def announce_drain(self) -> None:
        self._is_draining = True
        self.publish_state()

    def report_waiting(self, waits: bool) -> None:
        self._waits = waits
        self.publish_state()

    def hand_over(self) -> None:
        """Hand all sequences over; call `announce_drain` first, or they are sent here again."""
        self._fail_all(HandedOverError(f"{self._name} is draining"))

    def fail(self, error: ChannelError) -> None:
        """Fail every request of this rank because a peer is lost."""
        self.reason = error.message
        event(log, "peer_lost", logging.ERROR, rank=self._name, reason=error.message)
        self.publish_state()  # first, so that failed requests are not sent here again
        self._fail_all(error)

    # ---- one iteration

    def _turn(self) -> None:
        self._watch.record_progress()
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
            self.fail(self.executor.failure)
        self.send_answers()
        self._check_when_idle()

    def _receive(self) -> None:
        for received in self._clients.receive():
            for observer in self._observers:
                observer.received(received)
            self._handle(received)

    def _handle(self, received: ClientMessage) -> None:
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
        """Form batches as the policy decides; it is not called again until something changes."""
        if self.scheduler.changes == self._idle_changes and not self._compiled.is_set():
            return
        self._compiled.clear()
        backend = self.executor.backend
        if backend.is_engaged and len(self.scheduler):  # requests wait here
            waiting = map(self.scheduler.waiting_of, Priority)
            backend.disengage(sum(work.tokens for work in waiting))
        while not self.reason and not backend.is_engaged:
            batch = self._next_batch()
            if batch is None:
                self._idle_changes = self.scheduler.changes
                return
            plan = self._plan_of(batch)
            for observer in self._observers:
                observer.formed(batch)
            self.executor.submit(batch, plan)

    def _on_compiled(self) -> None:
        """Let a waiting sequence start. Called in another thread."""
        self._compiled.set()
        self.executor.wake()

    def _next_batch(self) -> ScheduledBatch | None:
        batches = map(self.scheduler.next_batch, self._batching(self._view))
        return next((batch for batch in batches if batch is not None), None)

    def _drop_best_effort(self) -> ScheduledBatch | None:
        """Drop the newest best-effort batch to free its blocks, if there is one."""
        numbers = [live.number for live in self.executor.live if live.priority is Priority.BE]
        dropped = self.executor.drop(numbers[-1]) if numbers else None
        if dropped is not None:
            event(log, "batch_dropped", rank=self._name, batch=dropped.number)
            for observer in self._observers:
                observer.dropped(dropped)
        return dropped

    def _step(self) -> list[ScheduledBatch]:
        """Return the completed batches; a failure to send fails the current requests only."""
        try:
            return self.executor.step(IDLE_POLL_S)
        except PeerError:
            raise
        except ChannelError as error:
            event(log, "batch_send_failed", logging.ERROR, rank=self._name, reason=error)
            self._fail_all(error)
            return []

    def _check_when_idle(self) -> None:
        """Check the block manager after some idle time; it takes as long as a layer or more."""
        if len(self.scheduler):
            self._busy_s = monotonic_s()
        elif self._busy_s is not None and monotonic_s() - self._busy_s > CHECK_AFTER_S:
            self._busy_s = None
            self.scheduler.blocks.check([])
            if self.scheduler.blocks.states is not None:
                self.scheduler.blocks.states.check([])

    def _fail_all(self, error: TandemError) -> None:
        for batch in self.executor.fail_all():
            self.scheduler.abandon(batch)
            for observer in self._observers:
                observer.dropped(batch)
        for sequence in self.scheduler.sequences:
            if not sequence.done:
                self.finisher.answers.append(
                    (sequence, failure_reply(sequence.submit.request_id, error))
                )
            self.scheduler.remove(sequence)
        self.send_answers()


class ServingParts(NamedTuple):
    """Parts of a serving loop. close: closes all threads and links; may be called twice."""

    scheduler: Scheduler
    executor: Executor
    finisher: Finisher
    watch: LoopWatchdog
    plan_of: Callable[[ScheduledBatch], Plan]
    close: Callable[[], None]
    observers: Sequence[Observer] = ()
    batching: BatchingPolicy = one_at_a_time


class SchedulerView(NamedTuple):
    """A `BatchingView`."""

    scheduler: Scheduler
    executor: Executor

    @property
    def in_flight(self) -> int:
        return self.executor.in_flight

    @property
    def live(self) -> Sequence[LiveBatch]:
        return self.executor.live

    @property
    def layers(self) -> int:
        return self.executor.layers

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.available

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def idle(self) -> Sequence[SequenceView]:
        return [
            sequence_view(s) for s in self.scheduler.sequences if not s.in_flight and not s.done
        ]

    def count(self, priority: Priority) -> int:
        return self.scheduler.count(priority)

    def waiting(self, priority: Priority) -> WaitingWork:
        return self.scheduler.waiting_of(priority)


def sequence_view(sequence: TokenSequence) -> SequenceView:
    return SequenceView(
        sequence.key,
        sequence.priority,
        sequence.phase,
        sequence.num_uncomputed,
        len(sequence.block_table),
        sequence.due_s,
        sequence.arrived_s,
        sequence.owner.tenant,
    )
