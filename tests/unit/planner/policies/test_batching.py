"""When another batch is formed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from contracts.requests import Priority
from planner.policies.batching import LiveBatch, Waiting, joining, one_at_a_time


class View(NamedTuple):
    """Batches of one class; of each, how many of its 8 layers are left."""

    left: tuple[int, ...]
    layers: int = 8
    free_blocks: int = 4

    @property
    def in_flight(self) -> int:
        return len(self.left)

    @property
    def live(self) -> list[LiveBatch]:
        return [LiveBatch(Priority.LS, 16, left) for left in self.left]

    def count(self, priority: Priority) -> int:
        return int(priority is Priority.LS)

    def waiting(self, priority: Priority) -> Waiting:
        return Waiting(1, 16)


@pytest.mark.parametrize(("left", "forms"), [((), True), ((8,), False), ((1, 2), False)])
def test_one_at_a_time_waits_for_whatever_runs(left: tuple[int, ...], forms: bool) -> None:
    assert bool(one_at_a_time(View(left))) is forms


@pytest.mark.parametrize(
    ("left", "forms"),
    [
        ((), True),
        ((8,), True),
        ((6,), True),
        ((5,), False),  # one more layer than another may have to catch up
        ((8, 5), False),
        ((8, 8), False),  # there are as many as may be
    ],
)
def test_another_batch_joins_while_none_has_gone_far(left: tuple[int, ...], forms: bool) -> None:
    assert bool(joining(most=2, within_layers=2)(View(left))) is forms
    if forms:
        assert joining(most=3, within_layers=8)(View((*left, 1)))
