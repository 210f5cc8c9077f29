"""How long a queue takes to drain, from how fast it has drained."""

from __future__ import annotations

import math

SHORTEST_S, LONGEST_S = 1.0, 600.0  # of what a client is told to wait
MEMORY_S = 10.0
BACKLOG = 8  # as many must wait for what leaves to tell how fast more would: they run together


class DrainRate:
    """What has left per second of late (sequences, tokens), over the time in which there was a
    backlog: an average in which what was MEMORY_S ago counts 1/e. Times are given, in order."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._drained = self._waited_s = 0.0
        self._last_s: float | None = None  # None: no backlog

    def begin(self, now_s: float) -> None:
        """There is a backlog, where there was none."""
        self._last_s = now_s

    def leave(self, amount: float, now_s: float, *, last: bool) -> None:
        """So much has left. last: there is no backlog any more. Without effect where there was
        none."""
        if self._last_s is None:
            return
        passed_s = now_s - self._last_s
        kept = math.exp(-passed_s / self._memory_s)
        self._drained = kept * self._drained + amount
        self._waited_s = kept * self._waited_s + passed_s
        self._last_s = None if last else now_s

    def per_second(self, now_s: float) -> float | None:
        """None: nothing has left yet. A queue that has stood still since counts as slower."""
        standing_s = 0.0 if self._last_s is None else now_s - self._last_s
        waited_s = self._waited_s + standing_s
        return self._drained / waited_s if self._drained and waited_s > 0 else None


def retry_after_s(excess: float, per_second: float | None) -> float:
    """When `excess` will have left: within SHORTEST_S and LONGEST_S; the former while nothing is
    known."""
    if per_second is None:
        return SHORTEST_S
    return min(max(excess / per_second, SHORTEST_S), LONGEST_S)
