"""Clients that were told to come again."""

from __future__ import annotations

from planner.policies.appointments import GRACE_S, Appointments, Promised

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
