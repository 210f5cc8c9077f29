"""Predicted task times by kind and size: moving averages of measured times."""

from __future__ import annotations

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
