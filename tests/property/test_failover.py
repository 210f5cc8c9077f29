"""Failover placements: all experts present, evenly, with the same pairs requested."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from actors.moe.dispatch import RankSlice, plan_dispatch
from actors.moe.remote_pending import recut
from contracts.placement import Placement
from planner.placement.failover import MAX_FAILOVER_RANKS, failover_placement, is_failover
from planner.placement.slots import ExpertPlacement, LayerSlots


@st.composite
def placements(draw: DrawFn) -> Placement:
    """Up to five ranks and nine experts, some replicated, in two of three layers."""
    ranks, experts = draw(st.integers(2, 5)), draw(st.integers(1, 9))
    generation = draw(st.integers(0, 1000))
    random = draw(st.randoms(use_true_random=False))
    own: list[list[list[int]]] = []
    for _ in range(2):
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for expert in random.sample(range(experts), experts):
            min(rows, key=len).append(expert)
        own.append(rows)
    slots = [len(row) for row in own[0]]
    for rank in range(ranks):
        if slots[rank] < experts and random.random() < 0.5:
            slots[rank] += 1
            for rows in own:
                rows[rank].append(next(e for e in range(experts) if e not in rows[rank]))
    lines = [tuple(expert for row in rows for expert in row) for rows in own]
    return Placement(
        num_experts=experts,
        generation=generation,
        slots_per_rank=tuple(slots),
        expert_of_slot=(lines[0], (), lines[1]),
    )


@given(placements(), st.sets(st.integers(0, 4)))
def test_failover_keeps_every_expert_and_surviving_slots(
    placement: Placement, lost: set[int]
) -> None:
    lost &= set(range(placement.ranks))
    found = failover_placement(placement, lost)
    left = [rank for rank in range(placement.ranks) if rank not in lost]
    if not left:
        assert found is None
        return
    assert found is not None  # made, so all its rules hold: every expert is in a slot
    assert is_failover(found.generation)
    assert (found.generation >> MAX_FAILOVER_RANKS) - 1 == placement.generation
    extra = [found.slots_per_rank[r] - placement.slots_per_rank[r] for r in left]
    assert max(extra) - min(extra) <= 1
    for rank in range(placement.ranks):
        held = found.experts_of(rank)
        for layer, kept in placement.experts_of(rank).items():
            assert held[layer][: len(kept)] == (() if rank in lost else kept)
    assert found == failover_placement(placement, sorted(lost, reverse=True))


def test_failover_generations_are_unique() -> None:
    made = Placement(num_experts=3, slots_per_rank=(1, 1, 1), expert_of_slot=((0, 1, 2),))
    found = set()
    for generation in range(3):
        for lost in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            placement = Placement(
                num_experts=3,
                generation=generation,
                slots_per_rank=made.slots_per_rank,
                expert_of_slot=made.expert_of_slot,
            )
            standing = failover_placement(placement, lost)
            assert standing is not None
            found.add(standing.generation)
    assert len(found) == 18
    assert not any(map(is_failover, range(1000)))


def pairs_of(piece: RankSlice, placed: LayerSlots) -> list[tuple[int, int, float]]:
    """(token, expert, weight), sorted."""
    low, high = placed.bounds[piece.rank]
    experts = np.repeat(placed.expert_of_slot[low:high], piece.counts_e)
    rows = piece.rows_U if piece.rows_U is not None else np.arange(piece.start, piece.stop)
    tokens = rows[piece.index_N]
    return sorted(zip(tokens.tolist(), experts.tolist(), piece.weights_N.tolist(), strict=True))


@given(placements(), st.integers(0, 4), st.integers(1, 20), st.integers(1, 2), st.integers(0, 99))
def test_slice_cut_again_requests_the_same_pairs(
    placement: Placement, lost: int, tokens: int, groups: int, seed: int
) -> None:
    lost %= placement.ranks
    standing = failover_placement(placement, [lost])
    assert standing is not None
    before, placed = (ExpertPlacement(one).layer(0) for one in (placement, standing))
    generator = np.random.default_rng(seed)
    top_k = min(3, placement.num_experts)
    ids_TK = np.argsort(generator.random((tokens, placement.num_experts)))[:, :top_k]
    weights_TK = generator.random((tokens, top_k), np.float32)
    middle = tokens // 2 if groups == 2 else 0
    bounds = [(0, middle), (middle, tokens)] if middle else [(0, tokens)]
    for piece in plan_dispatch(ids_TK, weights_TK, bounds, before):
        if piece.rank != lost:
            continue
        again = recut(piece, before, placed, 7)
        assert [one.token_group for one in again] == list(range(7, 7 + len(again)))
        assert lost not in {one.rank for one in again}
        found = sorted(pair for one in again for pair in pairs_of(one, placed))
        assert found == pairs_of(piece, before)
        for one in again:
            assert one.rows_U is not None
            assert (np.diff(one.rows_U) > 0).all()
            back = recut(one, placed, before, 0)  # to where it was, or to a replica
            assert sorted(p for b in back for p in pairs_of(b, before)) == pairs_of(one, placed)
