"""Dispatch against the definition of a mixture of experts, and the choice of replicas."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.moe.dispatch import plan_dispatch
from contracts.placement import Placement
from planner.placement.slots import ExpertPlacement, LayerSlots, contiguous
from planner.schedule.batch_plan import balanced_ranges, token_group_bounds
from tests.support.placements import replicated

Routing = tuple[np.ndarray, np.ndarray, int, Placement]
Case = tuple[Placement, np.ndarray, int | None]
LAYERS = 3
MOE_LAYERS = (1, 2)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
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
def test_pairs_are_sent_once_in_expert_order(routing: Routing, layer: int) -> None:
    ids_TK, weights_TK, r2, placement = routing
    tokens = len(ids_TK)
    bounds = token_group_bounds(tokens, r2)
    seen: dict[tuple[int, int], float] = {}
    for piece in plan_dispatch(ids_TK, weights_TK, bounds, ExpertPlacement(placement).layer(layer)):
        assert (piece.start, piece.stop) == bounds[piece.token_group]
        rows = np.arange(piece.start, piece.stop) if piece.rows_U is None else piece.rows_U
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
def test_replicas_share_the_tokens_of_their_expert(routing: Routing) -> None:
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


EXACT = 3  # limit of unserved experts up to which the minimum is exact


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a layer with replicas, experts of some tokens, and possibly a free rank."""
    ranks = draw(st.integers(2, 10))
    experts = draw(st.integers(ranks, 14))
    extra = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(any))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = replicated(experts, extra, num_layers=1, moe_layers=[0], seed=int(rng.integers(99)))
    tokens, top_k = draw(st.integers(1, 12)), draw(st.integers(1, min(8, experts)))
    ids_TK = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int64)
    if draw(st.booleans()):
        ids_TK = np.resize(ids_TK, (tokens + 128 // top_k, top_k))
    return placement, ids_TK, draw(st.none() | st.integers(0, ranks - 1))


@settings(deadline=None)
@given(cases())
def test_a_token_goes_to_the_fewest_ranks(case: Case) -> None:
    placement, ids_TK, free_rank = case
    before = ids_TK.copy()
    slot_TK = _layer(placement).of_pairs(ids_TK, free_rank)
    assert (ids_TK == before).all()
    assert (np.array(placement.expert_of_slot[0])[slot_TK] == ids_TK).all()
    holders = _holders(placement)
    seen = np.unique(np.concatenate([ids_TK, slot_TK], axis=1), axis=0)
    for experts, slots in (np.split(row, 2) for row in seen):
        sets = [holders[expert] for expert in experts]
        free = set() if free_rank is None else {free_rank}
        forced = free.union(*(ranks for ranks in sets if len(ranks) == 1))
        left = [ranks for ranks in sets if not ranks & forced]
        fewest = _fewest(left, placement.ranks)
        most = max(_greedy(left))
        assert len(left) > EXACT or most == fewest
        found = set(_ranks(placement, slots.tolist())) | forced
        assert fewest <= len(found) - len(forced) <= most


@settings(deadline=None)
@given(cases())
def test_slots_follow_the_rule_token_by_token(case: Case) -> None:
    placement, ids_TK, free_rank = case
    found = _layer(placement).of_pairs(ids_TK, free_rank)
    assert found.tolist() == _in_turn(placement, ids_TK, free_rank)


@settings(deadline=None)
@given(st.integers(2, 10), st.integers(1, 8), st.integers(1, 60))
def test_ranks_with_all_experts_differ_by_one_token(ranks: int, top_k: int, tokens: int) -> None:
    everywhere = LayerSlots([*range(8)] * ranks, [(8 * n, 8 * n + 8) for n in range(ranks)])
    ids_TK = np.tile(np.arange(top_k), (tokens, 1))
    slots = everywhere.of_pairs(ids_TK)
    assert all(len(set(row)) == 1 for row in (slots // 8).tolist())
    shares = np.bincount(slots[:, 0] // 8, minlength=ranks)
    assert shares.max() - shares.min() <= 1


@settings(deadline=None)
@given(cases(), cases())
def test_equal_tokens_get_equal_slots_regardless_of_history(case: Case, other: Case) -> None:
    placement, ids_TK, free_rank = case
    layer = _layer(placement)
    first = layer.of_pairs(ids_TK, free_rank)
    layer.of_pairs(other[1] % placement.num_experts, free_rank)
    assert np.array_equal(layer.of_pairs(ids_TK.copy(order="F"), free_rank), first)


@pytest.mark.parametrize("ranks", [56, 70], ids=["many", "beyond the most"])
def test_load_is_even_over_many_equal_ranks(ranks: int) -> None:
    everywhere = LayerSlots([0, 1] * ranks, [(2 * n, 2 * n + 2) for n in range(ranks)])
    slots = everywhere.of_pairs(np.tile([[1, 0]], (ranks * 3, 1)))
    assert (slots % 2 == [[1, 0]]).all()
    assert np.bincount(slots[:, 1] // 2).tolist() == [3] * ranks


def _layer(placement: Placement) -> LayerSlots:
    return ExpertPlacement(placement).layer(0)


def _holders(placement: Placement) -> list[set[int]]:
    """Return the ranks of each expert."""
    experts = [set(placement.experts_of(rank)[0]) for rank in range(placement.ranks)]
    return [
        {rank for rank, have in enumerate(experts) if expert in have}
        for expert in range(placement.num_experts)
    ]


def _ranks(placement: Placement, slots: Sequence[int]) -> list[int]:
    bounds = placement.slot_bounds
    return [next(n for n, (low, high) in enumerate(bounds) if low <= s < high) for s in slots]


def _fewest(sets: Sequence[set[int]], ranks: int) -> int:
    """Return the size of a smallest set with a rank of each set."""
    for count in range(ranks + 1):
        for chosen in itertools.combinations(range(ranks), count):
            if all(one.intersection(chosen) for one in sets):
                return count
    raise AssertionError("a set is empty")


def _greedy(sets: Sequence[set[int]]) -> Iterator[int]:
    """Yield the rule's number of ranks for every way to break ties."""
    if not sets:
        yield 0
        return
    ranks = set[int]().union(*sets)
    has = {rank: sum(rank in one for one in sets) for rank in ranks}
    for rank in ranks:
        if has[rank] == max(has.values()):
            yield from (1 + more for more in _greedy([one for one in sets if rank not in one]))


def _in_turn(placement: Placement, ids_TK: np.ndarray, free_rank: int | None) -> list[list[int]]:
    """Return slots by the rule of `replicas.py`, on sets."""
    holders, load = _holders(placement), [0] * placement.ranks
    slot_of = {
        (rank, expert): low + placement.experts_of(rank)[0].index(expert)
        for rank, (low, _) in enumerate(placement.slot_bounds)
        for expert in placement.experts_of(rank)[0]
    }
    for expert in ids_TK.ravel():
        if len(holders[expert]) == 1:
            load[min(holders[expert])] += 1
    slots = []
    for experts in ids_TK.tolist():
        sets = [holders[expert] for expert in experts]
        chosen = set() if free_rank is None else {free_rank}
        chosen = chosen.union(*(ranks for ranks in sets if len(ranks) == 1))
        while left := [ranks for ranks in sets if not ranks & chosen]:
            ranks = set[int]().union(*left)
            chosen.add(min(ranks, key=lambda r: (-sum(r in one for one in left), load[r], r)))
        found = []
        for expert in experts:
            rank = min(holders[expert] & chosen, key=lambda r: (load[r], r))
            load[rank] += len(holders[expert]) > 1
            found.append(slot_of[rank, expert])
        slots.append(found)
    return slots
