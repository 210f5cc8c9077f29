"""Copies, load and locality of hand-made placements."""

from __future__ import annotations

import numpy as np
import pytest

from planner.placement.routing import LayerRouting, TokenCounts, local_fraction, measure
from planner.placement.slots import LayerSlots

NOTHING = np.zeros(0, np.int64)
TWO_RANKS = LayerSlots([0, 1, 2, 3], [(0, 2), (2, 4)])


def _routing(sets: list[list[int]], ids: list[int]) -> LayerRouting:
    counts = TokenCounts(NOTHING, NOTHING, NOTHING)
    return LayerRouting(4, np.array(sets), np.array(ids), counts)


def test_copies_are_distinct_ranks_and_load_is_the_busiest_over_the_mean() -> None:
    found = measure(_routing([[0, 1], [0, 2], [1, 0], [0, 1]], [0, 1, 2, 3]), TWO_RANKS)
    assert found.copies == pytest.approx(5 / 4)
    assert found.load == found.batch_load == pytest.approx(7 / 4)


def test_pair_is_local_if_its_tokens_rank_has_the_expert() -> None:
    routing = _routing([[0, 1], [0, 2], [3, 1]], [7, 7, 5])
    ranks_of_ids = np.zeros(8, np.int64)
    ranks_of_ids[5] = 1
    assert local_fraction(routing, TWO_RANKS, ranks_of_ids) == pytest.approx(4 / 6)
    everywhere = LayerSlots([0, 1, 2, 3, 2, 3, 0, 1], [(0, 4), (4, 8)])
    assert local_fraction(routing, everywhere, ranks_of_ids) == 1.0


def test_empty_sample_is_even() -> None:
    empty = LayerRouting(4, np.zeros((0, 2), np.int64), NOTHING, TokenCounts(*[NOTHING] * 3))
    assert measure(empty, TWO_RANKS).load == 1.0
