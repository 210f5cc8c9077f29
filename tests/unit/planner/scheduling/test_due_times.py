"""When a slice of BE would cost a due time."""

from __future__ import annotations

import pytest

from planner.scheduling.preemption import LatencyPass, would_miss_due_time

NOW_S, SLICE_S = 10.0, 1.0


@pytest.mark.parametrize(
    ("due_s", "left_s", "late"),
    [
        (20.0, 8.0, False),
        (19.0, 8.0, False),  # just in time
        (18.9, 8.0, True),
        (10.5, 0.0, True),  # the slice alone is too long
        (9.0, 3.0, True),  # lost already, and later with the slice
        (10.0, 0.0, True),  # due at once (ls_ttft_s: 0)
    ],
)
def test_it_would_if_what_is_left_does_not_fit_behind_it(
    due_s: float, left_s: float, late: bool
) -> None:
    assert would_miss_due_time([LatencyPass(due_s, left_s)], SLICE_S, NOW_S) is late


def test_one_late_pass_among_many_is_enough_and_none_is_nobodys() -> None:
    in_time, late = LatencyPass(100.0, 1.0), LatencyPass(11.0, 1.0)
    assert would_miss_due_time([in_time, late, in_time], SLICE_S, NOW_S)
    assert not would_miss_due_time([in_time, in_time], SLICE_S, NOW_S)
    assert not would_miss_due_time([], SLICE_S, NOW_S)
