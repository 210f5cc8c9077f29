"""Clients that were told to come again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.policies import appointments
from planner.policies.appointments import GRACE_S, MOST, Appointments, Promised
from tests.support.steps import lines_run

A, B, C = b"a", b"b", b"c"


def test_who_comes_when_he_was_told_is_expected_and_counts_until_then() -> None:
    book = Appointments()
    book.give(A, 1, 10, now_s=100, in_s=20)
    book.give(A, 2, 5, now_s=101, in_s=30)
    assert book.ahead_of(A) == Promised(2, 15)
    assert [book.left_s(A, 1, now) for now in (100, 115, 120, 121)] == [20, 5, 0, 0]
    assert book.left_s(B, 1, 120) is None
    for _ in range(2):
        book.drop(A, 1)
        assert book.ahead_of(A) == Promised(1, 5)


def test_who_does_not_come_is_forgotten_after_a_grace() -> None:
    book = Appointments()
    book.give(A, 1, 10, now_s=0, in_s=20)
    book.give(A, 2, 10, now_s=0, in_s=100)
    last_s = 20 + GRACE_S + 20 / 5
    book.forget_late(last_s - 0.1)
    assert book.left_s(A, 1, last_s - 0.1) == 0
    book.forget_late(last_s)
    assert book.ahead_of(A) == Promised(1, 10)
    book.forget_late(1e9)
    assert (len(book), book.ahead_of(A)) == (0, Promised())


def test_of_too_many_promises_the_oldest_of_who_has_most_is_void() -> None:
    book = Appointments(most=4)
    book.give(B, 0, 1, now_s=0, in_s=5)
    for number in range(10):
        book.give(A, number, 1, now_s=0, in_s=5)
    assert len(book) == 4
    assert book.left_s(B, 0, 0) == 5
    assert [book.left_s(A, number, 0) for number in (6, 7)] == [None, 5]


def test_a_new_promise_takes_the_place_of_the_old_one() -> None:
    book = Appointments()
    book.give(A, 1, 10, now_s=0, in_s=20)
    book.give(A, 1, 10, now_s=20, in_s=7)
    assert book.ahead_of(A) == Promised(1, 10)
    assert book.left_s(A, 1, 20) == 7


def test_tenants_take_turns_so_a_thousand_promises_of_one_are_one_for_another() -> None:
    book = Appointments()
    for number in range(1000):
        book.give(A, number, 20, now_s=0, in_s=5)
    assert book.ahead_of(A) == Promised(1000, 20_000)
    assert book.ahead_of(B) == Promised(1, 20)
    book.give(B, 0, 7, now_s=0, in_s=5)
    book.give(C, 0, 3, now_s=0, in_s=5)
    assert book.ahead_of(B) == Promised(1 + 2 + 1, 7 + 40 + 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 9))), st.booleans())
def test_what_is_ahead_is_a_turn_of_each_tenant_for_each_that_the_newcomer_has_and_one_more(
    given_: list[tuple[int, int, int]], keep_all: bool
) -> None:
    """Beside a walk over all that was promised."""
    book, amounts = Appointments(), dict[tuple[int, int], int]()
    for tenant, request, amount in given_:
        if keep_all or (tenant, request) not in amounts:
            book.give(bytes([tenant]), request, amount, now_s=0, in_s=5)
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
        found = book.ahead_of(bytes([tenant]))
        assert found.requests == sum(turns.values())
        assert found.amount == pytest.approx(wanted)


def all_alike(promises: int) -> list[int]:
    return [1] * promises


def all_different(promises: int) -> list[int]:
    """1, 2, 3, ... as many promises to each tenant: the most lengths that there can be."""
    lengths = list(range(1, promises))
    while sum(lengths) > promises:
        lengths.pop()
    return [*lengths, promises - sum(lengths)]


@pytest.mark.parametrize("lines", [all_alike, all_different])
def test_a_newcomer_costs_a_hundred_steps_or_so_however_many_tenants_were_promised_how_much(
    lines: Callable[[int], list[int]],
) -> None:
    book = Appointments()
    for number, length in enumerate(lines(MOST)):
        for request in range(length):
            book.give(number.to_bytes(8, "big"), request, 20, now_s=0, in_s=5)
    assert len(book) == MOST

    def newcomer() -> None:
        book.forget_late(1)
        book.left_s(A, 1, 1)
        book.ahead_of(A)
        book.give(A, 1, 20, now_s=1, in_s=5)  # which makes the oldest one of who has most void
        book.drop(A, 1)

    lengths = len(set(lines(MOST)))
    assert lengths <= 91
    assert lines_run(newcomer, appointments) <= 4 * lengths + 100
