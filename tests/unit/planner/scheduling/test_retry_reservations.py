"""Reservations of rejected clients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scheduling import retry_reservations
from planner.scheduling.retry_reservations import (
    GRACE_S,
    MAX_RESERVATIONS,
    ReservedWork,
    RetryReservations,
)
from tests.support.steps import lines_run

A, B, C = b"a", b"b", b"c"


def test_client_that_returns_on_time_is_expected_and_counted() -> None:
    book = RetryReservations()
    book.reserve(A, 1, 10, now_s=100, in_s=20)
    book.reserve(A, 2, 5, now_s=101, in_s=30)
    assert book.queued_ahead(A) == ReservedWork(2, 15)
    assert [book.remaining_s(A, 1, now) for now in (100, 115, 120, 121)] == [20, 5, 0, 0]
    assert book.remaining_s(B, 1, 120) is None
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


def test_new_reservation_replaces_the_old_one() -> None:
    book = RetryReservations()
    book.reserve(A, 1, 10, now_s=0, in_s=20)
    book.reserve(A, 1, 10, now_s=20, in_s=7)
    assert book.queued_ahead(A) == ReservedWork(1, 10)
    assert book.remaining_s(A, 1, 20) == 7


def test_reservations_of_one_tenant_delay_another_by_one_turn() -> None:
    book = RetryReservations()
    for number in range(1000):
        book.reserve(A, number, 20, now_s=0, in_s=5)
    assert book.queued_ahead(A) == ReservedWork(1000, 20_000)
    assert book.queued_ahead(B) == ReservedWork(1, 20)
    book.reserve(B, 0, 7, now_s=0, in_s=5)
    book.reserve(C, 0, 3, now_s=0, in_s=5)
    assert book.queued_ahead(B) == ReservedWork(1 + 2 + 1, 7 + 40 + 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 9))), st.booleans())
def test_queued_ahead_equals_a_walk_over_all_reservations(
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
        turns = {
            other: count if other == tenant else min(count, most) for other, count in counts.items()
        }
        wanted = sum(sums[other] * turns[other] / counts[other] for other in turns)
        found = book.queued_ahead(bytes([tenant]))
        assert found.requests == sum(turns.values())
        assert found.amount == pytest.approx(wanted)


def all_alike(promises: int) -> list[int]:
    return [1] * promises


def all_different(promises: int) -> list[int]:
    """Return 1, 2, 3, ... reservations per tenant: the most different counts."""
    lengths = list(range(1, promises))
    while sum(lengths) > promises:
        lengths.pop()
    return [*lengths, promises - sum(lengths)]


@pytest.mark.parametrize("lines", [all_alike, all_different])
def test_new_request_costs_bounded_steps_with_many_tenants(
    lines: Callable[[int], list[int]],
) -> None:
    book = RetryReservations()
    for number, length in enumerate(lines(MAX_RESERVATIONS)):
        for request in range(length):
            book.reserve(number.to_bytes(8, "big"), request, 20, now_s=0, in_s=5)
    assert len(book) == MAX_RESERVATIONS

    def newcomer() -> None:
        book.expire(1)
        book.remaining_s(A, 1, 1)
        book.queued_ahead(A)
        book.reserve(A, 1, 20, now_s=1, in_s=5)  # which makes the oldest one of who has most void
        book.drop(A, 1)

    lengths = len(set(lines(MAX_RESERVATIONS)))
    assert lengths <= 91
    assert lines_run(newcomer, retry_reservations) <= 4 * lengths + 100
