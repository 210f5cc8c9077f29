"""Rate limit of expert loading."""

from __future__ import annotations

import threading

import pytest

from actors.rebalance.expert_loading import RateLimiter, StoppedError
from tests.support.manual_clock import ManualClock


def test_rate_limiter_waits_and_ends_when_stopped() -> None:
    clock, stopped = ManualClock(), threading.Event()
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        clock.advance(seconds)
        return stopped.is_set()

    gate = threading.Event()
    gate.wait = wait  # type: ignore[method-assign, assignment]
    limiter = RateLimiter(1000.0, gate, clock)
    for _ in range(10):
        limiter.acquire(100)
    assert abs(clock() - 1.0) < 0.02
    clock.advance(60.0)  # what was not used is not made up for
    limiter.acquire(1000)
    assert waited[-1] > 0.9
    stopped.set()
    with pytest.raises(StoppedError):
        limiter.acquire(1)
