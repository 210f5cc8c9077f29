"""Trace spans of batches, and a log line per request for the sequences that end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable

from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.logs import Line, log_lines
from contracts.traces import MAX_NAMES, BatchSpan

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
        """Write the collected lines."""
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
