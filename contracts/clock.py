"""Clocks as parameters, so that policies and tests control time."""

import time
from typing import Protocol


class Clock(Protocol):
    def __call__(self) -> float:
        """Return seconds of a monotonic clock that all processes of one node share."""


def monotonic_s() -> float:
    return time.monotonic()
