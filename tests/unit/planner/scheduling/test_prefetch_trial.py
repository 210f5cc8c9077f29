"""Whether to look ahead at all: by what both ways cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from planner.scheduling.prefetch_trial import MAX_EXPLOIT_PASSES, TRIAL_PASSES, PrefetchTrial


def ways(cost_s: Callable[[bool, int], float], passes: int) -> list[bool]:
    """Which passes looked ahead."""
    trial, found = PrefetchTrial(), []
    for number in range(passes):
        found.append(trial.enabled)
        trial.record_pass(cost_s(trial.enabled, number))
    return found


@pytest.mark.parametrize("better", [True, False])
def test_nearly_all_passes_go_the_way_that_costs_less(better: bool) -> None:
    dice = random.Random(1)

    def cost_s(enabled: bool, number: int) -> float:
        outlier = 50e-3 if dice.random() < 0.02 else 0.0
        return (1.0e-3 if enabled is better else 1.3e-3) * dice.uniform(0.7, 1.3) + outlier

    found = ways(cost_s, 20 * (MAX_EXPLOIT_PASSES + TRIAL_PASSES))
    assert found[: 4 * TRIAL_PASSES].count(False) == TRIAL_PASSES, "both are tried at first"
    assert found.count(better) / len(found) > 0.9


def test_it_turns_when_costs_turn() -> None:
    turn = 3 * (MAX_EXPLOIT_PASSES + TRIAL_PASSES)
    found = ways(lambda enabled, n: 1.0 if enabled is (n < turn) else 2.0, 2 * turn)
    late = found[turn + 2 * (MAX_EXPLOIT_PASSES + TRIAL_PASSES) :]
    assert late.count(False) / len(late) > 0.9


@pytest.mark.parametrize("better", [True, False])
def test_slots_that_fill_up_meanwhile_do_not_decide(better: bool) -> None:
    """Both ways cost four times as much at first, and less with each pass."""

    def cost_s(enabled: bool, number: int) -> float:
        return (1.0 + 3.0 * 0.95**number) * (1.0 if enabled is better else 1.1)

    found = ways(cost_s, 4 * (MAX_EXPLOIT_PASSES + TRIAL_PASSES))
    assert found[8 * TRIAL_PASSES :].count(better) / len(found[8 * TRIAL_PASSES :]) > 0.85


def test_worse_mode_is_retried_soon() -> None:
    """Chance alone decided the first trial."""
    found = ways(
        lambda enabled, n: 1.0 if enabled is (n < 4 * TRIAL_PASSES) else 2.0, 12 * TRIAL_PASSES
    )
    assert found[-2 * TRIAL_PASSES :].count(False) >= TRIAL_PASSES


def test_the_first_pass_of_a_way_pays_for_the_other_and_does_not_count() -> None:
    """Slots that hints have filled are found empty by nobody: the pass after them costs nothing."""
    before: list[bool] = []

    def cost_s(enabled: bool, number: int) -> float:
        turned = bool(before) and before[-1] is not enabled
        before.append(enabled)
        return (0.0 if enabled else 20.0) if turned else (1.2 if enabled else 1.0)

    found = ways(cost_s, 8 * (MAX_EXPLOIT_PASSES + TRIAL_PASSES))
    assert found[8 * TRIAL_PASSES :].count(False) / len(found[8 * TRIAL_PASSES :]) > 0.85


def test_equal_costs_keep_prefetching_enabled() -> None:
    found = ways(lambda enabled, n: 0.0, 2000)
    assert found.count(True) / len(found) > 0.9
