"""Whether to look ahead at all: by what both ways cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from planner.policies.read_ahead import KEPT, TRIED, Trial


def ways(cost_s: Callable[[bool, int], float], passes: int) -> list[bool]:
    """Which passes looked ahead."""
    trial, found = Trial(), []
    for number in range(passes):
        found.append(trial.is_on)
        trial.passed(cost_s(trial.is_on, number))
    return found


@pytest.mark.parametrize("better", [True, False])
def test_nearly_all_passes_go_the_way_that_costs_less(better: bool) -> None:
    dice = random.Random(1)

    def cost_s(is_on: bool, number: int) -> float:
        outlier = 50e-3 if dice.random() < 0.02 else 0.0
        return (1.0e-3 if is_on is better else 1.3e-3) * dice.uniform(0.7, 1.3) + outlier

    found = ways(cost_s, 20 * (KEPT + TRIED))
    assert found[: 4 * TRIED].count(False) == TRIED, "both are tried at first"
    assert found.count(better) / len(found) > 0.9


def test_it_turns_when_costs_turn() -> None:
    turn = 3 * (KEPT + TRIED)
    found = ways(lambda is_on, n: 1.0 if is_on is (n < turn) else 2.0, 2 * turn)
    late = found[turn + 2 * (KEPT + TRIED) :]
    assert late.count(False) / len(late) > 0.9


@pytest.mark.parametrize("better", [True, False])
def test_slots_that_fill_up_meanwhile_do_not_decide(better: bool) -> None:
    """Both ways cost four times as much at first, and less with each pass."""

    def cost_s(is_on: bool, number: int) -> float:
        return (1.0 + 3.0 * 0.95**number) * (1.0 if is_on is better else 1.1)

    found = ways(cost_s, 4 * (KEPT + TRIED))
    assert found[8 * TRIED :].count(better) / len(found[8 * TRIED :]) > 0.85


def test_a_long_way_of_the_worse_kind_is_looked_at_again_soon() -> None:
    """Chance alone decided the first trial."""
    found = ways(lambda is_on, n: 1.0 if is_on is (n < 4 * TRIED) else 2.0, 12 * TRIED)
    assert found[-2 * TRIED :].count(False) >= TRIED


def test_the_first_pass_of_a_way_pays_for_the_other_and_does_not_count() -> None:
    """Slots that hints have filled are found empty by nobody: the pass after them costs nothing."""
    before: list[bool] = []

    def cost_s(is_on: bool, number: int) -> float:
        turned = bool(before) and before[-1] is not is_on
        before.append(is_on)
        return (0.0 if is_on else 20.0) if turned else (1.2 if is_on else 1.0)

    found = ways(cost_s, 8 * (KEPT + TRIED))
    assert found[8 * TRIED :].count(False) / len(found[8 * TRIED :]) > 0.85


def test_a_way_that_costs_as_much_as_the_other_is_no_loss_and_looks_ahead() -> None:
    found = ways(lambda is_on, n: 0.0, 2000)
    assert found.count(True) / len(found) > 0.9
