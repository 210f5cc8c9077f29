"""Rate limits, Retry-After, reservations of rejected clients, and task times."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scheduling import admission
from planner.scheduling.admission import (
    BURST_S,
    GRACE_S,
    LONGEST_S,
    MAX_RESERVATIONS,
    SHORTEST_S,
    DrainRate,
    ReservedWork,
    RetryReservations,
    TokenBucket,
    retry_after_s,
)
from planner.scheduling.task_order import TaskTimes
from tests.support.steps import lines_run


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
def test_retry_after_is_between_1_second_and_10_minutes(excess: float, per_second: float) -> None:
    retry_s = retry_after_s(excess, per_second)
    assert SHORTEST_S <= retry_s <= LONGEST_S
    assert retry_s in (SHORTEST_S, LONGEST_S) or retry_s == excess / per_second
    assert retry_after_s(excess, None) == SHORTEST_S, "nothing is known"


def test_unused_rate_accumulates_up_to_the_burst_and_a_slow_rate_admits_one() -> None:
    bucket = TokenBucket(2.0, now_s=0.0)
    assert bucket.level(1000.0) == bucket.burst == 2.0 * BURST_S
    bucket.take(bucket.burst, 1000.0)
    assert bucket.wait_s(1.0, 1000.0) == pytest.approx(0.5)
    assert bucket.wait_s(1.0, 1000.5) == 0.0
    slow = TokenBucket(0.01, now_s=0.0)
    assert slow.wait_s(1.0, 0.0) == 0.0
    slow.take(1.0, 0.0)
    assert slow.wait_s(1.0, 0.0) == pytest.approx(100.0)


@given(
    st.floats(0.1, 1000.0),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5000.0)), max_size=60),
)
def test_usage_is_within_rate_and_wait_suffices(
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


def test_prediction_is_per_kind_and_octave_and_follows_times_by_a_fifth() -> None:
    times = TaskTimes()
    times.add("slice", 64, 1.0)
    found = [times.predict("slice", size) for size in (63, 64, 127, 128)]
    assert (found, times.predict("attention", 64)) == ([0.0, 1.0, 1.0, 0.0], 0.0)
    times.add("slice", 64, 6.0)
    assert times.predict("slice", 64) == pytest.approx(2.0)
    for _ in range(50):
        times.add("slice", 64, 6.0)
    assert times.predict("slice", 64) == pytest.approx(6.0, rel=1e-3)


A, B = b"a", b"b"


def test_client_that_returns_on_time_is_expected_and_counted() -> None:
    book = RetryReservations()
    book.reserve(A, 1, 10, now_s=100, in_s=20)
    book.reserve(A, 2, 5, now_s=101, in_s=30)
    assert book.queued_ahead(A) == ReservedWork(2, 15)
    assert [book.remaining_s(A, 1, now) for now in (100, 115, 120, 121)] == [20, 5, 0, 0]
    assert book.remaining_s(B, 1, 120) is None
    book.reserve(A, 1, 10, now_s=120, in_s=7)  # replaces the old one
    assert (book.queued_ahead(A), book.remaining_s(A, 1, 120)) == (ReservedWork(2, 15), 7)
    for _ in range(2):
        book.drop(A, 1)
        assert book.queued_ahead(A) == ReservedWork(1, 5)


def test_reservation_expires_after_grace_period() -> None:
    book = RetryReservations()
    book.reserve(A, 1, 10, now_s=0, in_s=20)
    book.reserve(A, 2, 10, now_s=0, in_s=100)
    last_s = 20 + GRACE_S + 20 / 5
    book.expire(last_s - 0.1)
    assert book.remaining_s(A, 1, last_s - 0.1) == 0
    book.expire(last_s)
    assert book.queued_ahead(A) == ReservedWork(1, 10)
    book.expire(1e9)
    assert (len(book), book.queued_ahead(A)) == (0, ReservedWork())


def test_oldest_reservation_of_the_largest_tenant_is_evicted() -> None:
    book = RetryReservations(most=4)
    book.reserve(B, 0, 1, now_s=0, in_s=5)
    for number in range(10):
        book.reserve(A, number, 1, now_s=0, in_s=5)
    assert len(book) == 4
    assert book.remaining_s(B, 0, 0) == 5
    assert [book.remaining_s(A, number, 0) for number in (6, 7)] == [None, 5]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 9))), st.booleans())
def test_queued_ahead_equals_a_walk_over_all(
    given_: list[tuple[int, int, int]], keep_all: bool
) -> None:
    book, amounts = RetryReservations(), dict[tuple[int, int], int]()
    for tenant, request, amount in given_:
        if keep_all or (tenant, request) not in amounts:
            book.reserve(bytes([tenant]), request, amount, now_s=0, in_s=5)
            amounts[tenant, request] = amount
        else:
            book.drop(bytes([tenant]), request)
            del amounts[tenant, request]
    counts, sums = Counter(tenant for tenant, _ in amounts), defaultdict[int, float](float)
    for (tenant, _), amount in amounts.items():
        sums[tenant] += amount
    for tenant in range(6):
        most = counts[tenant] + 1
        turns = {other: n if other == tenant else min(n, most) for other, n in counts.items()}
        wanted = sum(sums[other] * turns[other] / counts[other] for other in turns)
        found = book.queued_ahead(bytes([tenant]))
        assert found.requests == sum(turns.values())
        assert found.amount == pytest.approx(wanted)


def all_different(promises: int) -> list[int]:
    """Return 1, 2, 3, ... reservations per tenant: the most different counts."""
    lengths = list(range(1, promises))
    while sum(lengths) > promises:
        lengths.pop()
    return [*lengths, promises - sum(lengths)]


@pytest.mark.parametrize("lines", [[1] * MAX_RESERVATIONS, all_different(MAX_RESERVATIONS)])
def test_new_request_costs_bounded_steps_with_many_tenants(lines: list[int]) -> None:
    book = RetryReservations()
    for number, length in enumerate(lines):
        for request in range(length):
            book.reserve(number.to_bytes(8, "big"), request, 20, now_s=0, in_s=5)
    assert len(book) == MAX_RESERVATIONS

    def newcomer() -> None:
        book.expire(1)
        book.remaining_s(A, 1, 1)
        book.queued_ahead(A)
        book.reserve(A, 1, 20, now_s=1, in_s=5)  # which makes the oldest one of who has most void
        book.drop(A, 1)

    lengths = len(set(lines))
    assert lengths <= 91
    assert lines_run(newcomer, admission) <= 4 * lengths + 100
