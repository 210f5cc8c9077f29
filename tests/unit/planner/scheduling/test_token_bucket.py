"""Rate limits with bursts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scheduling.token_bucket import BURST_S, TokenBucket


def test_unused_rate_accumulates_up_to_the_burst() -> None:
    bucket = TokenBucket(2.0, now_s=0.0)
    assert bucket.level(1000.0) == bucket.burst == 2.0 * BURST_S
    bucket.take(bucket.burst, 1000.0)
    assert bucket.wait_s(1.0, 1000.0) == pytest.approx(0.5)
    assert bucket.wait_s(1.0, 1000.5) == 0.0


def test_slow_rate_admits_one_request() -> None:
    bucket = TokenBucket(0.01, now_s=0.0)
    assert bucket.wait_s(1.0, 0.0) == 0.0
    bucket.take(1.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(100.0)


@given(
    st.floats(0.1, 1000.0),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5000.0)), max_size=60),
)
def test_usage_stays_within_rate_and_reported_wait_suffices(
    per_s: float, uses: list[tuple[float, float]]
) -> None:
    bucket, now_s, used, last = TokenBucket(per_s, 0.0), 0.0, 0.0, 0.0
    for pause_s, amount in uses:
        now_s += pause_s
        wait_s = bucket.wait_s(1.0, now_s)
        assert bucket.wait_s(1.0, now_s + wait_s + 1e-6 * (1 + wait_s + now_s)) == 0.0
        if wait_s == 0.0:
            bucket.take(amount, now_s)
            used, last = used + amount, amount
    assert used - last <= (bucket.burst + per_s * now_s) * (1 + 1e-9)
