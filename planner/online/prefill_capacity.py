"""Headroom of a prefill worker for its recent work, from its own batch times.

A batch takes alpha + beta * x, where x is the time of such a batch in the reference passes at
start: large products are faster per FLOP than small ones, and a line through small batches misses
that. Without reference passes x is the FLOPs. At the knee a batch is as full as allowed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from planner.costs.online_fit import OnlineLinear
from planner.costs.stages import Linear

WINDOW_S = 60.0
COLD_BATCHES = 8
_UNIT = 1e9  # FLOPs, so that neither coefficient is tiny


class Batch(NamedTuple):
    """A batch; ms is None if it did not run alone."""

    ended_s: float
    flops: float
    tokens: int
    sequences: int
    ms: float | None


class ReferenceTime(NamedTuple):
    flops: float
    ms: float


class ReferenceCurve:
    """FLOPs to ms: linear between the points, constant below, a constant rate above."""

    def __init__(self, times: Sequence[ReferenceTime]) -> None:
        """Create a curve. Raises ValueError unless there is a point and all are above 0."""
        self._times = sorted(times)
        if not self._times or min(min(each) for each in self._times) <= 0:
            raise ValueError(f"reference times {times}: give one or more, of FLOPs and ms above 0")

    def at(self, flops: float) -> float:
        first, last = self._times[0], self._times[-1]
        if flops <= first.flops:
            return first.ms
        if flops >= last.flops:
            return last.ms * flops / last.flops
        index = bisect_left(self._times, flops, key=lambda time: time.flops)
        below, above = self._times[index - 1], self._times[index]
        part = (flops - below.flops) / (above.flops - below.flops)
        return below.ms + part * (above.ms - below.ms)


class PrefillCapacity:
    """Capacity of one worker; owned by one thread, except for `used_fraction`."""

    def __init__(self, *, max_tokens: int, max_sequences: int, started_s: float) -> None:
        """Create an empty record; the limits are those of a batch."""
        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        self._started_s = started_s
        self._batches: deque[Batch] = deque(maxlen=16_384)
        self._curve: ReferenceCurve | None = None
        self._model: OnlineLinear | None = None
        self._timed: list[tuple[float, float]] = []

    def refer(self, times: Sequence[ReferenceTime]) -> None:
        """Set the reference times, before the first `add`."""
        self._curve = ReferenceCurve(times)

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)
        if batch.ms is None or batch.ms <= 0:
            return
        x = self._size(batch.flops)
        if self._model is not None:
            self._model.update(x, batch.ms)
            return
        self._timed.append((x, batch.ms))
        if len(self._timed) == COLD_BATCHES:
            mean_x = sum(x for x, _ in self._timed) / COLD_BATCHES
            mean_ms = sum(ms for _, ms in self._timed) / COLD_BATCHES
            self._model = OnlineLinear(Linear(0.0, mean_ms / mean_x), mean_x, prior_samples=1)
            for x, ms in self._timed:
                self._model.update(x, ms)

    def used_fraction(self, now_s: float) -> float:
        """Return the traffic of the last minute over the possible traffic; 0 while unknown."""
        window_s = min(WINDOW_S, now_s - self._started_s)
        late = [batch for batch in list(self._batches) if batch.ended_s > now_s - window_s]
        if not late or self._model is None or window_s <= 0:
            return 0.0
        flops, tokens = sum(b.flops for b in late), sum(b.tokens for b in late)
        sequences = sum(b.sequences for b in late)
        full = min(self._max_tokens / tokens, self._max_sequences / sequences)  # of the traffic
        full_ms = self._model.model.at(self._size(full * flops))
        return full_ms / full / (1e3 * window_s)

    def _size(self, flops: float) -> float:
        return flops / _UNIT if self._curve is None else self._curve.at(flops)
