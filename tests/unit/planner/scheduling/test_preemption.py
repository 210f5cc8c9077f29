"""Preemption in simple cases; random schedules: tests/property/test_share_credit.py."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from contracts.requests import Priority
from planner.scheduling.task_order import LatencyPass, Preemption, ShareCredit, would_miss_due_time


class Work(NamedTuple):
    priority: int
    name: str = ""
    is_started: bool = False
    slice_s: float = 1.0


LS, BE = Work(Priority.LS), Work(Priority.BE)
STARTED_BE = Work(Priority.BE, is_started=True)
LATE, IN_TIME = LatencyPass(10.0, 20.0), LatencyPass(1000.0, 20.0)


class Rig:
    """A preemption policy with share 0.25, and its clock."""

    def __init__(self, be_share: float = 0.25) -> None:
        self.on_blocked, self.on_resumed = list[float](), list[float]()
        self.choice: Preemption[Work] = Preemption(
            lambda ready: ready[-1],
            be_share=be_share,
            on_blocked=self.on_blocked.append,
            on_resumed=self.on_resumed.append,
        )
        self.now_s = 0.0

    def pick(self, *ready: Work, live: Sequence[LatencyPass] = ()) -> Work | None:
        return self.choice.pick(ready, live, self.now_s)

    def run(self, work: Work, seconds: float) -> None:
        start_s, self.now_s = self.now_s, self.now_s + seconds
        self.choice.ran(work, start_s, self.now_s)


def test_ls_goes_first_by_the_given_order() -> None:
    rig = Rig()
    later = Work(Priority.LS, "later")
    assert rig.pick(BE, LS, later, BE) is later
    assert rig.pick(LS) is LS
    assert rig.pick() is None
    assert rig.pick(STARTED_BE, BE) is STARTED_BE, "begun work of BE, whatever the order"


def test_be_is_held_for_a_due_time_but_not_beyond_its_share() -> None:
    rig = Rig()
    assert rig.pick(BE, live=[IN_TIME, LATE]) is None
    rig.now_s += 2.0
    assert rig.pick(BE, live=[LATE]) is BE, "it is owed half a second"
    rig.run(BE, 4.0)
    assert rig.pick(STARTED_BE, live=[LATE]) is None
    rig.now_s += 2.0
    assert rig.pick(STARTED_BE, live=[IN_TIME]) is STARTED_BE
    assert rig.choice.held_s == 4.0
    assert rig.choice.preempted == 0, "nobody went before it"


def test_dropped_work_earns_no_credit_and_no_hold() -> None:
    """An expert rank loses the attention rank of its waiting work and idles for an hour."""
    for live in ((), (LATE,)):
        rig = Rig()
        rig.pick(*(() if live else (LS,)), BE, live=live)
        if not live:
            rig.run(LS, 1.0)
        rig.choice.forget()
        rig.now_s += 3600.0
        rig.pick(LS, BE)
        rig.run(LS, 1.0)
        rig.pick(BE)
        rig.run(BE, 1.0)
        assert rig.pick(LS, BE) is LS
        assert rig.choice.held_s == 0.0


def test_preemption_counts_once_and_reports_both_waits() -> None:
    rig = Rig(be_share=0.0)
    assert rig.pick(BE) is BE
    rig.run(BE, 3.0)
    for _ in range(2):  # another slice of the same LS task is no other preemption
        assert rig.pick(LS, STARTED_BE) is LS
        rig.run(LS, 5.0)
    assert rig.pick(STARTED_BE) is STARTED_BE
    rig.run(STARTED_BE, 1.0)
    assert (rig.choice.preempted, rig.on_blocked, rig.on_resumed) == (1, [3.0], [10.0])
    rig.pick(LS, BE)
    assert rig.choice.preempted == 1, "none that has begun stood at a yield"


def test_uncontended_be_time_is_charged_for_one_slice_only() -> None:
    floor = ShareCredit(0.25)
    for seconds in (4.0, 40.0, 2.0):
        floor.charge(seconds)
        assert floor.credit_s == -0.75 * seconds
    floor.add_wait(6.0)
    assert floor.credit_s == 0.0, "after that slice's (1 - f) / f it is owed again"


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
def test_slice_is_late_if_a_pass_does_not_fit_behind_it(
    due_s: float, left_s: float, late: bool
) -> None:
    passes = [LatencyPass(100.0, 1.0), LatencyPass(due_s, left_s)]
    assert would_miss_due_time(passes, SLICE_S, NOW_S) is late
