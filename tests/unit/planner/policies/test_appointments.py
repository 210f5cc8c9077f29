"""Clients that were told to come again."""

from __future__ import annotations

from planner.policies.appointments import GRACE_S, Appointments


def test_who_comes_when_he_was_told_is_expected_and_counts_until_then() -> None:
    book = Appointments()
    book.give("a", 10, now_s=100, in_s=20)
    book.give("b", 5, now_s=101, in_s=30)
    assert (len(book), book.amount) == (2, 15)
    assert [book.left_s("a", now) for now in (100, 115, 120, 121)] == [20, 5, 0, 0]
    assert book.left_s("c", 120) is None
    book.drop("a")
    assert (len(book), book.amount) == (1, 5)
    book.drop("a")
    assert book.amount == 5


def test_who_does_not_come_is_forgotten_after_a_grace() -> None:
    book = Appointments()
    book.give("a", 10, now_s=0, in_s=20)
    book.give("b", 10, now_s=0, in_s=100)
    last_s = 20 + GRACE_S + 20 / 5
    book.forget_late(last_s - 0.1)
    assert book.left_s("a", last_s - 0.1) == 0
    book.forget_late(last_s)
    assert (len(book), book.amount) == (1, 10)
    book.forget_late(1e9)
    assert (len(book), book.amount) == (0, 0)


def test_of_too_many_promises_the_oldest_is_void() -> None:
    book = Appointments(most=3)
    for number in range(10):
        book.give(number, 1, now_s=0, in_s=5)
    assert (len(book), book.amount) == (3, 3)
    assert book.left_s(6, 0) is None
    assert book.left_s(7, 0) == 5


def test_a_new_promise_takes_the_place_of_the_old_one() -> None:
    book = Appointments()
    book.give("a", 10, now_s=0, in_s=20)
    book.give("a", 10, now_s=20, in_s=7)
    assert (len(book), book.amount) == (1, 10)
    assert book.left_s("a", 20) == 7
