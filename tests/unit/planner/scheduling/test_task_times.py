"""Predicted task times by kind and size."""

from __future__ import annotations

import pytest

from planner.scheduling.task_times import TaskTimes


def test_untimed_kind_predicts_zero() -> None:
    times = TaskTimes()
    times.add("slice", 64, 1.0)
    assert times.predict("attention", 64) == 0.0
    assert times.predict("slice", 128) == 0.0


def test_sizes_within_a_factor_of_two_are_one() -> None:
    times = TaskTimes()
    times.add("slice", 64, 1.0)
    assert times.predict("slice", 127) == 1.0
    assert times.predict("slice", 63) == 0.0


def test_prediction_follows_times_by_a_fifth() -> None:
    times = TaskTimes()
    times.add("slice", 64, 1.0)
    times.add("slice", 64, 6.0)
    assert times.predict("slice", 64) == pytest.approx(2.0)
    for _ in range(50):
        times.add("slice", 64, 6.0)
    assert times.predict("slice", 64) == pytest.approx(6.0, rel=1e-3)
