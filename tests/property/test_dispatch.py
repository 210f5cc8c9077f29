"""Dispatch and combine against the definition of a mixture of experts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.moe.dispatch import plan_dispatch
from contracts.placement import Placement
from planner.placement.slots import ExpertPlacement, contiguous
from planner.schedule.batch_split import balanced_ranges, token_group_bounds
from tests.support.placements import replicated

LAYERS = 3
MOE_LAYERS = (1, 2)


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, Placement]:
    """Draw experts and weights of some tokens, r2, and a placement."""
    experts = draw(st.integers(1, 9))
    ranks = draw(st.integers(1, min(4, experts)))
    top_k = draw(st.integers(1, min(4, experts)))
    tokens = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids_TK = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int64)
    weights_TK = rng.random((tokens, top_k)).astype(np.float32)
    placement = contiguous(experts, ranks, num_layers=LAYERS, moe_layers=MOE_LAYERS)
    if draw(st.booleans()):
        extra = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
        placement = replicated(
            experts, extra, num_layers=LAYERS, moe_layers=MOE_LAYERS, seed=draw(st.integers(0, 99))
        )
    return ids_TK, weights_TK, draw(st.integers(1, 5)), placement


@given(routings(), st.sampled_from(MOE_LAYERS))
def test_pairs_are_sent_once_in_expert_order(
    routing: tuple[np.ndarray, np.ndarray, int, Placement], layer: int
) -> None:
    ids_TK, weights_TK, r2, placement = routing
    tokens = len(ids_TK)
    bounds = token_group_bounds(tokens, r2)
    seen: dict[tuple[int, int], float] = {}
    for piece in plan_dispatch(ids_TK, weights_TK, bounds, ExpertPlacement(placement).layer(layer)):
        assert (piece.start, piece.stop) == bounds[piece.token_group]
        rows = piece.rows_U
        if rows is None:
            rows = np.arange(piece.start, piece.stop)
        assert len(set(rows.tolist())) == len(rows) == piece.num_rows
        assert set(rows[piece.index_N].tolist()) == set(rows.tolist())  # nothing padded
        experts = np.repeat(placement.experts_of(piece.rank)[layer], piece.counts_e)
        for row, expert, weight in zip(rows[piece.index_N], experts, piece.weights_N, strict=True):
            assert (int(row), int(expert)) not in seen
            seen[int(row), int(expert)] = float(weight)
    expected = {
        (token, int(expert)): float(weight)
        for token in range(tokens)
        for expert, weight in zip(ids_TK[token], weights_TK[token], strict=True)
    }
    assert seen == expected


@given(routings())
def test_replicas_share_the_tokens_of_their_expert(
    routing: tuple[np.ndarray, np.ndarray, int, Placement],
) -> None:
    """If all tokens use one expert, its replicas differ by at most one token."""
    _, _, _, placement = routing
    slots = ExpertPlacement(placement).layer(1)
    for expert in range(placement.num_experts):
        found = slots.of_pairs(np.full((17, 1), expert))
        assert {placement.expert_of_slot[1][slot] for slot in found.ravel()} == {expert}
        replicas = placement.expert_of_slot[1].count(expert)
        shares = np.unique(found, return_counts=True)[1]
        assert len(shares) == replicas
        assert shares.max() - shares.min() <= 1


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 6))
def test_balanced_ranges_have_the_least_largest_sum(costs: list[float], parts: int) -> None:
    ranges = balanced_ranges(costs, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(costs)))
    assert len(ranges) <= parts
    found = max(sum(costs[start:stop]) for start, stop in ranges)
    assert found <= _least_largest_sum(costs, parts) * (1 + 1e-6)


def _least_largest_sum(costs: list[float], parts: int) -> float:
    """Return the optimum by dynamic programming."""
    best = [0.0, *(float("inf") for _ in costs)]
    for _ in range(parts):
        best = [
            min([best[stop]] + [max(best[start], sum(costs[start:stop])) for start in range(stop)])
            for stop in range(len(costs) + 1)
        ]
    return best[-1]


@given(st.integers(0, 50), st.integers(1, 9))
def test_token_groups_cover_all_tokens_evenly(tokens: int, r2: int) -> None:
    bounds = token_group_bounds(tokens, r2)
    sizes = [stop - start for start, stop in bounds]
    assert sum(sizes) == tokens
    assert len(bounds) == min(r2, tokens)
    assert not sizes or max(sizes) - min(sizes) <= 1
