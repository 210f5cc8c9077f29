"""Moving averages of task times, and the drain rate of a queue."""

import math

_NEWEST = 0.2  # weight of the latest time


class TaskTimes:
    """Seconds by kind and tokens; token counts within a factor of two share an entry."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        key = kind, tokens.bit_length()
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + _NEWEST * (seconds - known)

    def predict(self, kind: str, tokens: int) -> float:
        """Return the predicted seconds; 0 without a measurement."""
        return self._seconds.get((kind, tokens.bit_length()), 0.0)

    def forget(self, kind: str, tokens: int) -> None:
        self._seconds.pop((kind, tokens.bit_length()), None)


SHORTEST_S, LONGEST_S = 1.0, 600.0  # bounds of Retry-After
MEMORY_S = 10.0
BACKLOG = 8  # fewer waiting requests run together and do not show the rate


class DrainRate:
    """Amount drained per second while there was a backlog.

    An exponential average with time constant MEMORY_S. Times must not decrease.
    """

    def __init__(self) -> None:
        self._drained = self._waited_s = 0.0
        self._last_s: float | None = None  # None: no backlog

    def begin(self, now_s: float) -> None:
        """Start of a backlog."""
        self._last_s = now_s

    def leave(self, amount: float, now_s: float, *, last: bool) -> None:
        """Record a departure during a backlog; last: it ends the backlog."""
        if self._last_s is None:
            return
        passed_s = now_s - self._last_s
        kept = math.exp(-passed_s / MEMORY_S)
        self._drained = kept * self._drained + amount
        self._waited_s = kept * self._waited_s + passed_s
        self._last_s = None if last else now_s

    def per_second(self, now_s: float) -> float | None:
        """Return the rate, or None before any departure; idle time lowers it."""
        standing_s = 0.0 if self._last_s is None else now_s - self._last_s
        waited_s = self._waited_s + standing_s
        return self._drained / waited_s if self._drained and waited_s > 0 else None


def retry_after_s(excess: float, per_second: float | None) -> float:
    """Return the time in which `excess` drains, within SHORTEST_S and LONGEST_S."""
    if per_second is None:
        return SHORTEST_S
    return min(max(excess / per_second, SHORTEST_S), LONGEST_S)
