"""BE's credit, by hand."""

from __future__ import annotations

import pytest

from planner.scheduling.preemption import ShareCredit


def test_credit_grows_by_the_share_while_others_run_and_falls_by_the_rest_while_be_does() -> None:
    floor = ShareCredit(0.25)
    floor.add_wait(8.0)
    assert floor.credit_s == 2.0
    floor.charge(1.0)
    assert floor.credit_s == 2.0 - 0.75


def test_be_goes_first_while_there_is_credit_and_not_at_nothing() -> None:
    floor = ShareCredit(0.5)
    assert not floor.is_owed
    floor.add_wait(1.0)
    assert floor.is_owed
    floor.charge(1.0)
    assert floor.credit_s == 0.0
    assert not floor.is_owed


def test_uncontended_be_time_is_charged_for_one_slice_only() -> None:
    floor = ShareCredit(0.25)
    for seconds in (4.0, 40.0, 2.0):
        floor.charge(seconds)
        assert floor.credit_s == -0.75 * seconds
    floor.add_wait(6.0)
    assert floor.credit_s == 0.0, "after that slice's (1 - f) / f it is owed again"


@pytest.mark.parametrize("seconds", [1.0, 1000.0])
def test_without_a_share_be_is_never_owed(seconds: float) -> None:
    floor = ShareCredit(0.0)
    floor.add_wait(seconds)
    assert not floor.is_owed
    floor.charge(0.0)
    assert not floor.is_owed
