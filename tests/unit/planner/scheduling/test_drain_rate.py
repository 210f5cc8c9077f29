"""Drain rate of a queue and Retry-After."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.scheduling.drain_rate import LONGEST_S, SHORTEST_S, DrainRate, retry_after_s


def test_time_without_backlog_is_not_counted() -> None:
    rate = DrainRate()
    for hour in range(3):
        now_s = 3600.0 * hour
        rate.begin(now_s)
        for index in range(10):
            now_s += 0.1
            rate.leave(64, now_s, last=index == 9)
        rate.leave(64, now_s + 30, last=True)  # alone: it says nothing of what many would take
        assert abs((rate.per_second(now_s + 60) or 0) - 640) < 1e-6


def test_stalled_backlog_lowers_the_rate() -> None:
    rate = DrainRate()
    rate.begin(0.0)
    assert rate.per_second(5.0) is None, "nothing has left yet"
    rate.leave(100, 1.0, last=False)
    assert rate.per_second(1.0) == 100
    assert rate.per_second(10.0) == 10


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_retry_after_is_between_one_second_and_ten_minutes(
    excess: float, per_second: float
) -> None:
    retry_s = retry_after_s(excess, per_second)
    assert SHORTEST_S <= retry_s <= LONGEST_S
    assert retry_s in (SHORTEST_S, LONGEST_S) or retry_s == excess / per_second
    assert retry_after_s(excess, None) == SHORTEST_S, "nothing is known"
