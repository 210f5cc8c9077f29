"""Invariants of solved placements and of the search's sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.placement import bounds_of
from planner.placement.layout import EMPTY, Layout
from planner.placement.objective import Objective, usual_costs
from planner.placement.routing import LayerRouting, Measured
from planner.placement.search import exchanges
from planner.placement.slots import contiguous_line, first_homes
from planner.placement.solve import sample_of, solve_layer
from planner.placement.token_ranks import ID_LOAD, rank_of_ids
from tests.support.made_up_routing import any_routing


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerRouting, list[int]]:
    """Draw a sample and uneven slots per rank, enough for all experts."""
    experts = draw(st.integers(2, 12))
    ranks = draw(st.integers(1, min(5, experts)))
    top_k = draw(st.integers(1, min(4, experts)))
    tokens = draw(st.integers(20, 400))
    routing = any_routing(experts, top_k, tokens, draw(st.integers(0, 2**20)))
    base = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    extra = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    slots = [min(experts, a + b) for a, b in zip(base, extra, strict=True)]
    return routing, slots


def _price(measured: Measured, top_k: int, ranks: int, limit: float) -> float:
    costs = usual_costs(top_k, ranks)._replace(load_limit=limit)
    busiest = measured.load * top_k / ranks
    return float(Objective(costs, 1.0, float(top_k), ranks).price(measured.copies, busiest))


@settings(max_examples=12, deadline=None)
@given(layers())
def test_placement_is_valid_and_no_worse_than_contiguous(
    layer: tuple[LayerRouting, list[int]],
) -> None:
    routing, slots = layer
    placed = solve_layer(routing, slots)
    line, top_k = placed.expert_of_slot, routing.sets_PK.shape[1]
    assert len(line) == sum(slots)
    assert set(line) == set(range(routing.num_experts))
    for low, high in bounds_of(slots):
        assert len(set(line[low:high])) == high - low
    costs = usual_costs(top_k, len(slots))
    free, limited = float("inf"), costs.load_limit
    better = [
        _price(placed.measured, top_k, len(slots), limit)
        <= _price(placed.baseline, top_k, len(slots), limit) + 1e-9
        for limit in (free, limited)
    ]
    assert any(better)


@settings(max_examples=40, deadline=None)
@given(layers(), st.integers(0, 2**20))
def test_incremental_sums_equal_recomputed_sums(
    layer: tuple[LayerRouting, list[int]], seed: int
) -> None:
    routing, slots = layer
    rng = np.random.default_rng(seed)
    sample = sample_of(routing, usual_costs(routing.sets_PK.shape[1], len(slots)), len(slots))
    line = contiguous_line(routing.load(), slots)
    layout = Layout(sample, np.array(line), np.repeat(np.arange(len(slots)), slots))
    for _ in range(6):
        possible = np.argwhere(np.isfinite(exchanges(layout)))
        if not len(possible):
            return
        i, j = possible[rng.integers(len(possible))]
        undo = layout.exchange(int(i), int(j))
        _agree(layout)
        if rng.random() < 0.3:
            layout.revert(undo)
            _agree(layout)


def _agree(layout: Layout) -> None:
    fresh = layout._sums(np.arange(len(layout.slots_MK)))
    for kept, seen in zip(layout.sums, fresh, strict=True):
        np.testing.assert_allclose(kept, seen, atol=1e-9)
    table_ER = layout.slot_table()
    assert (layout.experts_S[layout.slots_MK] == layout.sample.sets_MK).all()
    assert (table_ER.max(1) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(layers(), st.integers(0, 2**20))
def test_without_replicas_an_exchange_costs_what_was_predicted(
    layer: tuple[LayerRouting, list[int]], seed: int
) -> None:
    routing, slots = layer
    rng = np.random.default_rng(seed)
    homes_R = first_homes(routing.num_experts, slots)
    sample = sample_of(routing, usual_costs(routing.sets_PK.shape[1], len(slots)), len(slots))
    ranks_E = rng.permutation(np.repeat(np.arange(len(slots)), homes_R))
    layout = Layout(sample, np.arange(routing.num_experts), ranks_E)
    price_SS = exchanges(layout)
    for i, j in np.argwhere(np.isfinite(price_SS))[:20].tolist():
        undo = layout.exchange(i, j)
        assert layout.price() == pytest.approx(price_SS[i, j])
        layout.revert(undo)
    assert not (layout.experts_S == EMPTY).any()


@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 2**20))
def test_token_ids_are_assigned_within_the_load_bound(ids: int, ranks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    local_VR = rng.integers(0, 30, (ids, ranks)).astype(float)
    times_V = np.maximum(local_VR.max(1), rng.integers(0, 40, ids))
    label_V = rank_of_ids(np.concatenate([local_VR, times_V[:, None]], 1))
    load_R = np.bincount(label_V, times_V, ranks)
    largest = times_V.max()
    assert load_R.max() <= max(ID_LOAD * times_V.sum() / ranks, largest) + largest
    if ids >= 20 * ranks:
        assert load_R.max() <= ID_LOAD * times_V.sum() / ranks + largest
