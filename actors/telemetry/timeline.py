"""A ring of task spans per rank, and one of its batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from contracts.traces import BatchSpan, RankTrace, Stage, TaskSpan, boot_identity
from planner.schedule.exposed_communication import length, union


class Timeline:
    """Keeps the last `capacity` spans and batches, and the seconds of each stage since the start.

    `observe` sees every span (for metrics). `exposed_s`: seconds so far in which the rank waited
    while a payload for it was under way. keeps: whether any span is kept.
    """

    def __init__(self, capacity: int, observe: Callable[[TaskSpan], None] | None = None) -> None:
        self._spans: deque[TaskSpan] = deque(maxlen=capacity)
        self._batches: deque[BatchSpan] = deque(maxlen=capacity)
        self.keeps = capacity > 0
        self._observe = observe
        self.exposed_s = 0.0
        self.stage_seconds = {stage.value: 0.0 for stage in Stage}

    def add(self, span: TaskSpan) -> None:
        self.stage_seconds[span.stage] += span.end_s - span.start_s
        if self.keeps:
            self._spans.append(span)
        if self._observe is not None:
            self._observe(span)

    def add_batch(self, batch: BatchSpan) -> None:
        if self.keeps:
            self._batches.append(batch)

    def record_wait(
        self, start_s: float, end_s: float, transfers: Iterable[tuple[float, float]]
    ) -> None:
        """The rank waited from start_s to end_s, and `transfers` arrived in that time."""
        inside = [(max(start_s, sent), min(end_s, arrived)) for sent, arrived in transfers]
        self.exposed_s += length(union([(a, b) for a, b in inside if b > a]))

    def spans(self) -> list[TaskSpan]:
        return list(self._spans)

    def since(self, rank: str, since_s: float) -> RankTrace:
        """What has ended since then, on the clock of the spans. From any thread."""
        spans, batches = list(self._spans), list(self._batches)
        is_full = len(spans) == self._spans.maxlen
        return RankTrace(
            rank=rank,
            spans=[span for span in spans if span.end_s >= since_s],
            batches=[batch for batch in batches if batch.end_s >= since_s],
            is_cut=is_full and bool(spans) and spans[0].end_s >= since_s,
            boot=boot_identity(),
        )
