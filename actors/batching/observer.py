"""Observation and control of a serving loop, and the traces of its batches."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from actors.rpc.client_server import ClientMessage
from actors.telemetry.telemetry import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError
from contracts.logs import Line, log_lines
from contracts.messages import Event, Submit
from contracts.traces import MAX_NAMES, BatchSpan

if TYPE_CHECKING:  # the planner's process has neither, nor torch
    from actors.batching.batch_builder import ScheduledBatch
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
        self._formed_s: dict[int, float] = {}
        self._lines: list[Line] = []
        self._flush_s = 0.0

    def formed(self, batch: ScheduledBatch) -> None:
        self._formed_s[batch.number] = self._clock()

    def dropped(self, batch: ScheduledBatch) -> None:
        self._formed_s.pop(batch.number, None)

    def completed(self, batch: ScheduledBatch) -> None:
        start_s, now_s = self._formed_s.pop(batch.number, None), self._clock()
        if self._timeline.keeps and start_s is not None:
            self._timeline.add_batch(self._span(batch, start_s, now_s))
        if log.isEnabledFor(logging.INFO):
            self._log_ended(batch, now_s)

    def stepped(self) -> None:
        if self._lines and self._clock() >= self._flush_s:
            self.write()

    def write(self) -> None:
        lines, self._lines = self._lines, []
        log_lines(log, lines)

    def _span(self, batch: ScheduledBatch, start_s: float, end_s: float) -> BatchSpan:
        names = dict.fromkeys(chunk.sequence.submit.caller.name for chunk in batch.chunks)
        names.pop("", None)
        first, others = tuple(names)[:MAX_NAMES], max(0, len(names) - MAX_NAMES)
        label = batch.priority.label
        return BatchSpan(
            self._rank, batch.number, start_s, end_s, batch.tokens, label, first, others
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
