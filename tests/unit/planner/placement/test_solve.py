"""The placement solver on samples with known optimum and on poor samples; measures."""

import itertools

import numpy as np
import pytest

from benchmarks.placement.synthetic import planted, routing_of
from contracts.errors import ConfigError
from planner.placement.layout import Layout, Objective, PlacementCosts, usual_costs
from planner.placement.routing import LayerRouting, Measured, TokenCounts, local_fraction, measure
from planner.placement.slots import LayerSlots, Line, contiguous_line, held, layer_slots, moved
from planner.placement.solve import price_with_ids, sample_of, solve_layer, split
from tests.support.made_up_routing import any_routing, grouped


@pytest.mark.parametrize(("experts", "slots"), [(6, (3, 3)), (7, (3, 2, 2)), (8, (4, 4))])
@pytest.mark.parametrize("seed", range(4))
def test_small_layers_are_placed_optimally(experts: int, slots: tuple[int, ...], seed: int) -> None:
    routing = any_routing(experts, 2, 3000, seed)
    fitted, _ = split(routing)
    costs = usual_costs(2, len(slots))
    sample = sample_of(fitted, costs, len(slots))
    prices = {
        ranks: price_with_ids(Layout(sample, np.arange(experts), np.array(ranks)), routing.counts)
        for ranks in set(itertools.permutations(np.repeat(np.arange(len(slots)), slots).tolist()))
    }
    where = held(solve_layer(routing, slots, costs=costs), slots, experts).argmax(1)
    assert prices[tuple(where.tolist())] == pytest.approx(min(prices.values()))


@pytest.mark.long
@pytest.mark.parametrize(("experts", "groups"), [(16, 4), (24, 3), (64, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found(experts: int, groups: int, seed: int) -> None:
    routing, group_E = planted(experts, 3, groups, stray=0.05, tokens=4000, seed=seed)
    each = experts // groups
    line = solve_layer(routing, [each] * groups)
    for rank in range(groups):
        assert len(set(group_E[list(line[rank * each : (rank + 1) * each])])) == 1


@pytest.mark.parametrize("seed", range(2))
def test_many_experts_per_rank_are_balanced_finely(seed: int) -> None:
    """16 experts on each of 4 ranks, hot ones adjacent: in order the load is about 1.5."""
    rng = np.random.default_rng(seed)
    weight_E = np.repeat([3.0, 1.5, 1.0, 0.5], 16) * rng.uniform(0.5, 1.5, 64)
    score_PE = np.log(weight_E) + rng.gumbel(size=(5000, 64))
    sets_PK = np.argpartition(-score_PE, 3, axis=1)[:, :3]
    routing = routing_of(64, sets_PK, np.arange(5000) % 300)
    fitted, _ = split(routing)
    load = measure(fitted, layer_slots(solve_layer(routing, [16] * 4, work=10**6), [16] * 4)).load
    assert measure(fitted, layer_slots(tuple(range(64)), [16] * 4)).load > 1.4
    assert load <= 1 + 0.6 / 16 + 0.01


def held_out(routing: LayerRouting, line: Line, slots: list[int]) -> Measured:
    return measure(split(routing)[1], layer_slots(line, slots))


def test_ordered_router_groups_stay_together() -> None:
    assert solve_layer(grouped(32, 4, 4, tokens=4000, seed=0), [8] * 4) == tuple(range(32))


def test_replicas_save_copies_and_even_out_a_hot_expert() -> None:
    rng = np.random.default_rng(0)
    other_P = rng.integers(1, 8, 4000)
    routing = routing_of(8, np.stack([np.zeros_like(other_P), other_P], 1), other_P)
    line = solve_layer(routing, [5, 5])
    assert held(line, [5, 5], 8)[0].all()  # the one that every token goes to
    spare = held_out(routing, line, [5, 5])
    without = held_out(routing, solve_layer(routing, [4, 4]), [4, 4])
    assert spare.copies < 1.05 < 1.4 < without.copies
    assert spare.load < 1.1 < without.load


def test_costs_decide_between_load_and_copies() -> None:
    routing = any_routing(16, 2, 4000, seed=5)
    lines = [
        solve_layer(routing, [4] * 4, costs=PlacementCosts(pair, copy, load_limit=np.inf))
        for pair, copy in ((10.0, 0.1), (0.1, 10.0))
    ]
    even, near = (held_out(routing, line, [4] * 4) for line in lines)
    assert even.load < near.load
    assert near.copies < even.copies


def test_start_changes_only_if_it_pays_and_within_max_moves() -> None:
    routing, other = (any_routing(16, 2, 6000, seed) for seed in (1, 2))
    costs = usual_costs(2, 4)
    settled = solve_layer(routing, [4] * 4, costs=costs)
    again = solve_layer(routing, [4] * 4, costs=costs, start=settled)
    free = solve_layer(other, [4] * 4, start=settled)
    few = solve_layer(other, [4] * 4, start=settled, max_moves=3)
    moves, of_few, of_again = (sum(moved(settled, line, [4] * 4)) for line in (free, few, again))
    assert 0 < of_few <= 3 < moves <= 16
    assert of_again < moves
    kept = sum(a == b for a, b in zip(settled, free, strict=True))
    assert kept == 16 - moves, "an expert that stays on a rank keeps its slot"
    prices = [_price(held_out(other, line, [4] * 4)) for line in (free, few, settled)]
    assert prices[0] < prices[1] < prices[2]
    dear = costs._replace(move=0.5)
    assert solve_layer(other, [4] * 4, start=settled, costs=dear) == settled


def _price(measured: Measured) -> float:
    """Return the price per token of two experts on four ranks."""
    objective = Objective(usual_costs(2, 4), 1.0, 2.0, 4)
    return float(objective.price(measured.copies, measured.load / 2))


@pytest.mark.parametrize("tokens", [0, 1, 4, 300])
def test_few_tokens_give_a_valid_placement(tokens: int) -> None:
    routing = any_routing(16, 2, tokens, seed=0)
    line = solve_layer(routing, [5, 6, 5])
    assert sorted(set(line)) == list(range(16))
    if tokens < 4:
        assert line == contiguous_line(routing.load(), [5, 6, 5])


def test_repeated_text_gives_a_valid_placement_which_is_deterministic() -> None:
    routing = any_routing(16, 2, 7, seed=0)
    sets_PK, ids_P = np.tile(routing.sets_PK, (300, 1)), np.tile(routing.ids_P, 300)
    repeated = routing_of(16, sets_PK, ids_P)
    line, other = (solve_layer(repeated, [4] * 4) for _ in range(2))
    assert sorted(line) == list(range(16))
    in_order = contiguous_line(split(repeated)[0].load(), [4] * 4)
    copies, baseline = (held_out(repeated, each, [4] * 4).copies for each in (line, in_order))
    assert copies <= baseline
    assert line == other
    assert solve_layer(any_routing(9, 3, 500, seed=0), [9]) == tuple(range(9))
    for slots in ((4, 3), (9, 4), (-1, 9), ()):
        with pytest.raises(ConfigError, match="8 experts need as many slots"):
            solve_layer(any_routing(8, 2, 100, seed=0), slots)


NOTHING = np.zeros(0, np.int64)
TWO_RANKS = LayerSlots([0, 1, 2, 3], [(0, 2), (2, 4)])


COUNTS = TokenCounts(NOTHING, NOTHING, NOTHING)


def _routing(sets: list[list[int]], ids: list[int]) -> LayerRouting:
    return LayerRouting(4, np.array(sets), np.array(ids), COUNTS)


def test_measures_of_hand_made_placements() -> None:
    found = measure(_routing([[0, 1], [0, 2], [1, 0], [0, 1]], [0, 1, 2, 3]), TWO_RANKS)
    assert found.copies == pytest.approx(5 / 4)  # distinct ranks
    assert found.load == pytest.approx(7 / 4)  # the busiest over the mean
    empty = LayerRouting(4, np.zeros((0, 2), np.int64), NOTHING, COUNTS)
    assert measure(empty, TWO_RANKS).load == 1.0
    routing = _routing([[0, 1], [0, 2], [3, 1]], [7, 7, 5])
    ranks_of_ids = np.zeros(8, np.int64)
    ranks_of_ids[5] = 1
    assert local_fraction(routing, TWO_RANKS, ranks_of_ids) == pytest.approx(4 / 6)
    everywhere = LayerSlots([0, 1, 2, 3, 2, 3, 0, 1], [(0, 4), (4, 8)])
    assert local_fraction(routing, everywhere, ranks_of_ids) == 1.0
