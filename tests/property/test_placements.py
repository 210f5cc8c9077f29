"""Placements: solved, resized, and of failover."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from actors.moe.dispatch import RankSlice, plan_dispatch
from benchmarks.placement.synthetic import planted
from contracts.errors import ConfigError
from contracts.placement import Placement, bounds_of
from planner.placement.layout import EMPTY, Layout, Objective, usual_costs
from planner.placement.nodes import aligned
from planner.placement.resize import (
    MAX_FAILOVER_RANKS,
    experts_received,
    failover_placement,
    is_failover,
    resize_placement,
)
from planner.placement.routing import ID_LOAD, LayerRouting, measure, rank_of_ids, shares
from planner.placement.search import exchanges
from planner.placement.slots import (
    ExpertPlacement,
    LayerSlots,
    contiguous,
    contiguous_line,
    first_homes,
    layer_slots,
)
from planner.placement.solve import WORK, sample_of, solve_layer, split
from tests.support.made_up_routing import any_routing
from tests.support.placements import replicated

Layer = tuple[LayerRouting, list[int]]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
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


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(layers())
def test_placement_is_valid_and_no_worse_than_contiguous(layer: Layer) -> None:
    routing, slots = layer
    line, top_k = solve_layer(routing, slots, work=WORK // 10), routing.sets_PK.shape[1]
    assert len(line) == sum(slots)
    assert set(line) == set(range(routing.num_experts))
    for low, high in bounds_of(slots):
        assert len(set(line[low:high])) == high - low
    costs = usual_costs(top_k, len(slots))
    fitted, kept = split(routing)
    in_order = contiguous_line(fitted.load(), slots)
    figures = [measure(kept, layer_slots(each, slots)) for each in (line, in_order)]
    better = []
    for limit in (float("inf"), costs.load_limit):
        objective = Objective(costs._replace(load_limit=limit), 1.0, float(top_k), len(slots))
        solved, baseline = (
            float(objective.price(found.copies, found.load * top_k / len(slots)))
            for found in figures
        )
        better.append(solved <= baseline + 1e-9)
    assert any(better)


@settings(max_examples=40, deadline=None)
@given(layers(), st.integers(0, 2**20))
def test_incremental_sums_equal_recomputed_sums(layer: Layer, seed: int) -> None:
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


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**20))
def test_aligned_layers_have_token_ids_on_one_rank_and_equal_copies(groups: int, seed: int) -> None:
    experts, slots, rng = 4 * groups, [4] * groups, np.random.default_rng(seed)
    routings, lines, labels = [], [], []
    for layer in range(4):
        routing, group_E = planted(experts, 2, groups, stray=0.1, tokens=600, seed=seed + layer)
        routings.append(routing)
        lines.append(tuple(np.argsort(rng.permutation(groups)[group_E]).tolist()))
    found = aligned(lines, [each.counts for each in routings], slots, experts)
    for routing, before, after in zip(routings, lines, found, strict=True):
        placed = layer_slots(after, slots)
        figures = measure(routing, layer_slots(before, slots))
        assert measure(routing, placed) == pytest.approx(figures)
        shares_VR1 = shares(*routing.counts, placed.held(experts))
        local_GR = shares_VR1[: 30 * groups, :-1].reshape(30, groups, groups).sum(0)
        labels.append(local_GR.argmax(1).tolist())
    assert labels == [labels[0]] * 4
    assert sorted(labels[0]) == list(range(groups))


def _agree(layout: Layout) -> None:
    fresh = layout._sums(np.arange(len(layout.slots_MK)))
    for kept, seen in zip(layout.sums, fresh, strict=True):
        np.testing.assert_allclose(kept, seen, atol=1e-9)
    table_ER = layout.slot_table()
    assert (layout.experts_S[layout.slots_MK] == layout.sample.sets_MK).all()
    assert (table_ER.max(1) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(layers(), st.integers(0, 2**20))
def test_without_replicas_an_exchange_costs_what_was_predicted(layer: Layer, seed: int) -> None:
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


def made(experts: int, extra: list[int], seed: int) -> Placement:
    return replicated(experts, extra, num_layers=3, moe_layers=(0, 2), seed=seed)


resizable = st.builds(
    made,
    st.integers(5, 9),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(0, 1 << 16),
)


@given(resizable, st.integers(1, 5))
def test_resize_keeps_all_experts_and_even_slots(placement: Placement, ranks: int) -> None:
    found = resize_placement(placement, ranks, generation=7)  # made, so all its rules hold
    assert (found.ranks, found.generation) == (ranks, 7)
    assert max(found.slots_per_rank) - min(found.slots_per_rank) <= 1
    assert [bool(line) for line in found.expert_of_slot] == [True, False, True]
    spare = sum(placement.slots_per_rank) - placement.num_experts
    least = min(spare // placement.ranks * ranks, (placement.num_experts - 1) * ranks)
    assert sum(found.slots_per_rank) - placement.num_experts >= min(
        least, (ranks - 1) * placement.num_experts
    )
    assert found == resize_placement(placement, ranks, generation=7)


def fewest(had: list[set[int]], slots: tuple[int, ...], experts: int) -> int:
    """Return the fewest experts that must move, by trying all that ranks could keep."""
    ways = [
        [set(kept) for size in range(room + 1) for kept in itertools.combinations(own, size)]
        for own, room in zip(had, slots, strict=True)
    ]
    return min(
        sum(slots) - sum(map(len, kept))
        for kept in itertools.product(*ways)
        if experts - len(set().union(*kept)) <= sum(slots) - sum(map(len, kept))
    )


def held(placement: Placement, layer: int, ranks: int) -> list[set[int]]:
    line = placement.expert_of_slot[layer]
    found = [set(line[low:high]) for low, high in placement.slot_bounds[:ranks]]
    return found + [set() for _ in range(ranks - len(found))]


@given(
    st.integers(3, 5),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.integers(0, 1 << 16),
    st.integers(1, 3),
)
def test_resize_moves_the_fewest_experts(
    experts: int, extra: list[int], seed: int, ranks: int
) -> None:
    placement = made(experts, extra, seed)
    found = resize_placement(placement, ranks, generation=1)
    least = sum(
        fewest(held(placement, layer, ranks), found.slots_per_rank, experts) for layer in (0, 2)
    )
    assert sum(experts_received(placement, found)) == least


@given(st.integers(1, 12), st.data())
def test_without_replicas_only_resized_ranks_cause_loads(experts: int, data: st.DataObject) -> None:
    before, after = (data.draw(st.integers(1, min(5, experts))) for _ in range(2))
    placement = contiguous(experts, before, num_layers=1, moe_layers=[0])
    found = resize_placement(placement, after, generation=1)
    loads = experts_received(placement, found)
    if after >= before:
        assert not any(loads[:before])
        assert sum(loads) == sum(found.slots_per_rank[before:])
    else:
        assert sum(loads) == sum(placement.slots_per_rank[after:])
    back = resize_placement(found, before, generation=2)
    assert sorted(back.slots_per_rank) == sorted(placement.slots_per_rank)
    for ranks in (0, experts + 1):
        with pytest.raises(ConfigError, match=rf"{ranks} expert ranks .*: give 1 to {experts}"):
            resize_placement(placement, ranks, generation=1)


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
def test_failover_keeps_experts_and_surviving_slots(placement: Placement, lost: set[int]) -> None:
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
    found = set()
    for generation in range(3):
        placement = Placement(
            num_experts=3,
            generation=generation,
            slots_per_rank=(1, 1, 1),
            expert_of_slot=((0, 1, 2),),
        )
        for lost in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
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
        again = piece.recut(before, placed, 7)
        assert [one.token_group for one in again] == list(range(7, 7 + len(again)))
        assert lost not in {one.rank for one in again}
        found = sorted(pair for one in again for pair in pairs_of(one, placed))
        assert found == pairs_of(piece, before)
        for one in again:
            assert one.rows_U is not None
            assert (np.diff(one.rows_U) > 0).all()
            back = one.recut(placed, before, 0)  # to where it was, or to a replica
            assert sorted(p for b in back for p in pairs_of(b, before)) == pairs_of(one, placed)
