"""Clocks as parameters, so that policies and tests control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def __call__(self) -> float:
        """Return seconds of a monotonic clock that all processes of one node share."""


def monotonic_s() -> float:
    return time.monotonic()


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
