"""How long work of a kind and size takes, from how long it took: averages that follow the
machine."""

from __future__ import annotations

_NEWEST = 0.2  # the weight of the newest time


class TaskTimes:
    """Seconds by kind and number of tokens, numbers within a factor of two together."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        key = kind, tokens.bit_length()
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + _NEWEST * (seconds - known)

    def predict(self, kind: str, tokens: int) -> float:
        """0 where nothing of that kind and size was timed yet."""
        return self._seconds.get((kind, tokens.bit_length()), 0.0)
