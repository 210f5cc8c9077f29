"""Ring buffers of a rank's task spans and batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from contracts.traces import BatchSpan, RankTrace, Stage, TaskSpan, boot_identity
from planner.schedule.exposed_communication import length, union


class Timeline:
    """The last `capacity` spans and batches, and the seconds of each stage since the start.

    observe: called with every span, for metrics. exposed_s: seconds in which the rank waited while
    a payload for it was in transfer. keeps: True if spans are kept.
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
        """Record that the rank waited and that `transfers` arrived in that time."""
        inside = [(max(start_s, sent), min(end_s, arrived)) for sent, arrived in transfers]
        self.exposed_s += length(union([(a, b) for a, b in inside if b > a]))

    def spans(self) -> list[TaskSpan]:
        return list(self._spans)

    def since(self, rank: str, since_s: float) -> RankTrace:
        """Return what has ended since `since_s` on the clock of the spans. Thread-safe."""
        spans, batches = list(self._spans), list(self._batches)
        is_full = len(spans) == self._spans.maxlen
        return RankTrace(
            rank=rank,
            spans=[span for span in spans if span.end_s >= since_s],
            batches=[batch for batch in batches if batch.end_s >= since_s],
            is_cut=is_full and bool(spans) and spans[0].end_s >= since_s,
            boot=boot_identity(),
        )
