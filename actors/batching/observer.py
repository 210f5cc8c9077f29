"""Observation and control of a serving loop: traces, due times and admission."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from actors.rpc.client_server import ClientMessage
from actors.telemetry.telemetry import Timeline
from contracts.clock import Clock
from contracts.config import PriorityConfig
from contracts.errors import ChannelError, OverloadError, RequestError, TooLongError
from contracts.logs import Line, log_lines
from contracts.messages import Event, Submit
from contracts.requests import (
    INT64,
    MAX_LOGPROBS,
    Priority,
    check_ids,
    check_integer,
    check_lengths,
    check_sampling,
)
from contracts.traces import MAX_NAMES, BatchSpan
from planner.scheduling.admission import BACKLOG, DrainRate, retry_after_s
from planner.scheduling.batching import Phase

if TYPE_CHECKING:  # the planner's process has neither, nor torch
    from actors.batching.batch_builder import ScheduledBatch
    from actors.batching.scheduler import Scheduler
    from actors.batching.sequence import Sequence


class LoopControl(Protocol):
    """Operations that an observer may call in the loop's thread."""

    def admit(self, client: int, submit: Submit) -> None:
        """Admit a request as if a client had sent it."""

    def send_answers(self) -> None:
        """Send all pending answers now."""

    def send(self, client: int, events: list[Event]) -> None: ...

    def fail(self, error: ChannelError) -> None:
        """Stop serving: every request ends with this error."""

    def announce_drain(self) -> None:
        """Announce that this rank accepts nothing new."""

    def report_waiting(self, waits: bool) -> None:
        """Report whether the rank is waiting and makes no progress."""

    def hand_over(self) -> None:
        """Hand every request over to other ranks."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of running and of waiting sequences."""


class Observer:
    """Does nothing by default. Called in the loop's thread, except `sections` and `notes`."""

    def begin(self, loop: LoopControl) -> None:
        """Run first in the loop."""

    def received(self, message: ClientMessage) -> None:
        """Run before a message is processed."""

    def check(self, client: int, submit: Submit) -> None:
        """Raise TandemError to refuse a request."""

    def accepted(self, sequence: Sequence) -> None:
        """Run before a sequence is queued. An exception ends that sequence."""

    def formed(self, batch: ScheduledBatch) -> None:
        """Run when a batch starts."""

    def stepped(self) -> None:
        """Run once per iteration."""

    def completed(self, batch: ScheduledBatch) -> None:
        """Run after a batch has completed in the scheduler."""

    def dropped(self, batch: ScheduledBatch) -> None:
        """Run when a started batch is dropped."""

    def ended(self, sequence: Sequence) -> None:
        """Run after a sequence left the scheduler, for any reason."""

    def answers(self, by_client: dict[int, list[Event]]) -> None:
        """Add to the events that are about to be sent."""

    def sections(self) -> dict[str, dict[str, float]]:
        """Return sections of the rank's status. Thread-safe."""
        return {}

    def notes(self) -> dict[str, str]:
        """Return notes of the rank's status. Thread-safe."""
        return {}


log = logging.getLogger("tandem.requests")

FLUSH_AFTER_S = 0.2
FLUSH_LINES = 1000


class BatchTraces(Observer):
    """Records batches under clients' request names. Log lines are written in groups."""

    def __init__(self, rank: str, timeline: Timeline, clock: Clock) -> None:
        self._rank, self._timeline, self._clock = rank, timeline, clock
        self._lines: list[Line] = []
        self._flush_s = 0.0

    def completed(self, batch: ScheduledBatch) -> None:
        now_s = self._clock()
        if self._timeline.keeps:
            self._timeline.add_batch(self._span(batch, now_s))
        if log.isEnabledFor(logging.INFO):
            self._log_ended(batch, now_s)

    def stepped(self) -> None:
        if self._lines and self._clock() >= self._flush_s:
            self.write()

    def write(self) -> None:
        lines, self._lines = self._lines, []
        log_lines(log, lines)

    def _span(self, batch: ScheduledBatch, end_s: float) -> BatchSpan:
        names = dict.fromkeys(chunk.sequence.submit.caller.name for chunk in batch.chunks)
        names.pop("", None)
        first, others = tuple(names)[:MAX_NAMES], max(0, len(names) - MAX_NAMES)
        label = batch.priority.label
        return BatchSpan(
            self._rank, batch.number, batch.formed_s, end_s, batch.tokens, label, first, others
        )

    def _log_ended(self, batch: ScheduledBatch, now_s: float) -> None:
        """Add a line for each request whose sequences ended with this batch."""
        ended: dict[str, list[Sequence]] = {}
        for chunk in batch.chunks:
            name = chunk.sequence.submit.caller.name
            if chunk.sequence.done and name:
                ended.setdefault(name, []).append(chunk.sequence)
        if ended and not self._lines:
            self._flush_s = now_s + FLUSH_AFTER_S
        at_s = time.time() if ended else 0.0
        for name, sequences in ended.items():
            fields: dict[str, object] = {"request_id": name, "rank": self._rank}
            self._lines.append((at_s, "sequences_ended", fields | _totals(sequences, now_s)))
        if len(self._lines) >= FLUSH_LINES:
            self.write()


def _totals(sequences: Iterable[Sequence], now_s: float) -> dict[str, object]:
    sums, longest_s = Counter[str](), 0.0
    for each in sequences:
        sums["sequences"] += 1
        sums["failed"] += each.failure is not None
        sums["prompt_tokens"] += each.prompt_tokens
        sums["cached_tokens"] += each.num_cached or 0
        sums["generated_tokens"] += each.generated
        longest_s = max(longest_s, now_s - each.arrived_s)
    return {**sums, "ms": round(1e3 * longest_s, 1)}


MARGIN_PASSES: Final = 3.0  # passes of time reserved before a token is due
MAX_RIDE_PASSES: Final = 2.0  # BE joins while this many passes fit between two tokens
_DECAY: Final = 0.9  # of the longest pass time, per batch


class DecodeCoalescer(Observer):
    """Arrival and due times of LS sequences (QLLM, Section 4), and coalescing of their decodes.

    A pass over a few tokens delays BE about as much as one over many, because it goes through every
    layer of both groups. So while BE runs, a decode of LS starts when its token's due time
    (`priority.ls_tbt_s`) requires it. Decodes that are ready by then join it, BE's too as long as
    such passes fit into that time. BE is never due. max_sequences: of a batch.
    """

    def __init__(
        self, config: PriorityConfig, scheduler: Scheduler, clock: Clock, max_sequences: int
    ) -> None:
        self._config, self._scheduler, self._clock = config, scheduler, clock
        self._max_sequences = max_sequences
        self._pass_s = math.inf  # recent longest pass of LS decodes; inf: none has run
        self._wake_s = math.inf  # when a waiting decode must be scheduled

    def accepted(self, sequence: Sequence) -> None:
        sequence.arrived_s = self._clock() - sequence.submit.waited_s
        if sequence.priority is Priority.LS:
            sequence.due_s = sequence.arrived_s + self._config.ls_ttft_s

    def completed(self, batch: ScheduledBatch) -> None:
        if batch.priority is not Priority.LS:
            return
        now_s = self._clock()
        for chunk in batch.chunks:
            if chunk.sequence.generated and chunk.sequence.priority is Priority.LS:
                chunk.sequence.due_s = now_s + self._config.ls_tbt_s
        if batch.phase is Phase.DECODE:
            decayed_s = 0.0 if self._pass_s == math.inf else _DECAY * self._pass_s
            self._pass_s = max(now_s - batch.formed_s, decayed_s)

    def slack_s(self) -> float:
        """Return how long idle LS decodes can still wait; <= 0: not at all; inf: none idle."""
        due_s = min(map(_due_s, self._scheduler.started), default=math.inf)
        if due_s == math.inf:
            return math.inf
        begin_s, now_s = due_s - MARGIN_PASSES * self._pass_s, self._clock()
        self._wake_s = begin_s if begin_s > now_s else math.inf
        return begin_s - now_s

    def free_places(self) -> int:
        """Return how many sequences may start while BE's decodes join LS's; -1: BE may not join."""
        in_time = MAX_RIDE_PASSES * self._pass_s <= self._config.ls_tbt_s
        of_ls = sum(sequence.priority is Priority.LS for sequence in self._scheduler.started)
        if not in_time or of_ls > self._max_sequences // 2:
            return -1
        return max(0, self._max_sequences - self._scheduler.running)

    def stepped(self) -> None:
        if self._clock() >= self._wake_s:
            self._wake_s = math.inf
            self._scheduler.changes += 1


def _due_s(sequence: Sequence) -> float:
    idle = not (sequence.in_flight or sequence.done) and sequence.phase is Phase.DECODE
    return sequence.due_s if idle else math.inf


class AdmissionLimits(NamedTuple):
    """Limits of a rank."""

    rank: str
    vocabulary: int
    max_context_tokens: int
    pool_tokens: int
    max_waiting: int


class RankAdmission(Observer):
    """Checks requests, and measures how fast sequences start, by class, for Retry-After.

    The rate is measured while enough of them wait.
    """

    def __init__(self, limits: AdmissionLimits, scheduler: Scheduler, clock: Clock) -> None:
        self._limits, self._scheduler, self._clock = limits, scheduler, clock
        self._rates = {priority: DrainRate() for priority in Priority}
        self._started = dict.fromkeys(Priority, 0)  # in all
        self._is_backlog = dict.fromkeys(Priority, False)

    def check(self, client: int, submit: Submit) -> None:
        """Raise RequestError, OverloadError or TooLongError."""
        if self._scheduler.has((client, submit.request_id)):
            raise RequestError(f"request_id {submit.request_id} is in use", "request_id")
        self._check_fields(submit)
        self._check_queue(client, submit)
        rank, _, max_context_tokens, pool_tokens, _ = self._limits
        tokens = len(submit.token_ids)
        if submit.sampling is not None:
            most = submit.prompt_tokens + submit.sampling.max_tokens
            tokens = min(most, max_context_tokens)
        fits = 0 < len(submit.token_ids) <= max_context_tokens - bool(submit.generated)
        if not fits or tokens > pool_tokens:
            limit = min(pool_tokens, max_context_tokens)
            raise TooLongError(
                f"{tokens} tokens do not fit {rank}'s {limit} tokens; shorten the prompt "
                "or raise kv.pool_tokens",
                "prompt",
            )

    def retry_after_s(self, priority: Priority, excess: int) -> float:
        """Return the time until `excess` more sequences of that class have started."""
        return retry_after_s(excess, self._rates[priority].per_second(self._clock()))

    def accepted(self, sequence: Sequence) -> None:
        """Note the start of a backlog. Called before the sequence is queued."""
        priority = sequence.priority
        enough = self._scheduler.num_waiting(priority) + 1 >= BACKLOG
        if enough and not self._is_backlog[priority]:
            self._rates[priority].begin(self._clock())
        self._is_backlog[priority] = enough

    def formed(self, batch: ScheduledBatch) -> None:
        for priority in Priority:
            total = self._scheduler.started_total[priority]
            started, self._started[priority] = total - self._started[priority], total
            enough = self._scheduler.num_waiting(priority) >= BACKLOG
            if started:
                self._rates[priority].leave(started, self._clock(), last=not enough)
                self._is_backlog[priority] = enough

    def _check_queue(self, client: int, submit: Submit) -> None:
        """Bound the queue of each class so that no request or class fills it for others.

        Beyond max_waiting, the first sequence of each request is still accepted, up to twice as
        many in all. Sequences that another rank started are always accepted.
        """
        priority, limit = submit.priority, self._limits.max_waiting
        waiting = self._scheduler.num_waiting(priority)
        if waiting < limit or submit.generated:
            return
        if self._scheduler.has_others(client, submit) or waiting >= 2 * limit:
            raise OverloadError(
                f"{self._limits.rank}: {waiting} {priority.name} sequences wait, the limit is "
                f"{limit} (schedule.max_waiting)",
                self.retry_after_s(priority, waiting - limit + 1),
            )

    def _check_fields(self, submit: Submit) -> None:
        """Repeat the HTTP checks: one bad value must not break a whole batch."""
        for field, ids in (("token_ids", submit.token_ids), ("candidates", submit.candidates)):
            check_ids(field, ids or (), self._limits.vocabulary)
        if submit.score_from is not None:
            check_integer("score_from", submit.score_from, 1, INT64 - 1)
        check_integer("score_top", submit.score_top, 0, MAX_LOGPROBS)
        if submit.sampling is not None:
            check_integer("max_tokens", submit.sampling.max_tokens, 1, INT64 - 1)
            check_sampling(submit.sampling, self._limits.vocabulary)
            check_lengths(submit.sampling)
        most = 0 if submit.sampling is None else submit.sampling.max_tokens - 1
        most = min(most, max(0, len(submit.token_ids) - 1))
        check_integer("generated", submit.generated, 0, most)
