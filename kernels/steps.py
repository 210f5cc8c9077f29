"""Work that may be interrupted: a generator that yields where others may go first.

Its frame is the parked state, so that what it gives does not depend on what ran between its yields:
the same operations in the same order, equal bits (QLLM, Section 3: preemption at experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[None, None, T]


def run_through(steps: Steps[T]) -> T:
    """Runs it to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value


def at_once(stepped: Callable[P, Steps[T]]) -> Callable[P, T]:
    """The same function without interruptions."""

    @functools.wraps(stepped)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_through(stepped(*args, **kwargs))

    return whole
