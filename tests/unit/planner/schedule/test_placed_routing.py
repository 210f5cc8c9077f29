"""Routing shapes from samples and placements; plans of different layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.plan import Order, Plan
from planner.costs.routing_shape import RankShare, RoutingShape, Spread
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.slots import LayerSlots
from planner.schedule.deployment_search import planned_split, with_overhead
from planner.schedule.placed_routing import spread_of
from planner.schedule.recurrence import makespan_ms, makespan_of_layers_ms
from planner.schedule.replay import replay
from planner.schedule.schedule import schedule_of
from planner.schedule.solver import PlannedBatch
from tests.unit.planner.schedule.test_deployment_search import best, with_link, workload

NONE = np.zeros(0, np.int64)


def routing_of(sets: object, experts: int) -> LayerRouting:
    sets_PK, counts = np.array(sets, np.int64), TokenCounts(NONE, NONE, NONE)
    return LayerRouting(experts, sets_PK, np.zeros(len(sets_PK), np.int64), counts)


def test_spread_of_hand_made_sample() -> None:
    """Experts 0 1 | 2 3: the second rank has 3 of 4 tokens and 5 of 8 pairs."""
    routing = routing_of([[0, 1], [2, 3], [3, 2], [0, 3]], 4)
    spread = spread_of(routing, LayerSlots(range(4), [(0, 2), (2, 4)]))
    assert spread.copies == 5 / 4
    assert spread.busiest == RankShare(3 / 4, 5 / 8 * 4)
    assert (spread.load, spread.slots, spread.ranks) == (5 / 4, 2, 2)


@given(st.integers(0, 1000), st.integers(1, 5000), st.integers(1, 4))
def test_spread_matches_placement_measure(seed: int, tokens: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    sets = np.argsort(random.random((tokens, 8)), axis=1)[:, :3]
    routing = routing_of(sets, 8)
    bounds = [(8 * rank // ranks, 8 * (rank + 1) // ranks) for rank in range(ranks)]
    placed = LayerSlots(random.permutation(8).tolist(), bounds)
    spread, measured = spread_of(routing, placed), measure(routing, placed)
    assert spread.copies == pytest.approx(measured.copies)
    assert 1 - 1e-9 <= spread.load <= ranks + 1e-9
    if tokens <= 2048:
        assert spread.load == pytest.approx(measured.load)


def test_at_home_counts_copies_on_the_tokens_rank() -> None:
    """Expert 0 is on both ranks, token t lives on rank t % 2: one of four copies leaves."""
    routing = routing_of([[0, 1], [0, 2], [0, 3], [0, 2]], 4)
    spread = spread_of(routing, LayerSlots([0, 1, 0, 2, 3], [(0, 2), (2, 5)]))
    assert spread.copies == 4 / 4
    assert spread.at_home == 2 * (1 - 1 / 4)
    once = spread_of(routing, LayerSlots(range(4), [(0, 2), (2, 4)]))
    assert once.at_home == 1
    everywhere = spread_of(routing, LayerSlots([0, 1, 2, 3] * 2, [(0, 4), (4, 8)]))
    assert everywhere.at_home == 2  # nothing leaves


def test_empty_sample_is_rejected() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        spread_of(routing_of([], 4), LayerSlots(range(4), [(0, 4)]))


def stages(expert_ms: float) -> StageModels:
    link = Linear(0.1, 0.01)
    return StageModels(
        attention=Linear(1.0, 1.0), expert=Linear(0.1, expert_ms), a2e=link, e2a=link
    )


def spec(one: StageModels, layers: int) -> PlanSpec:
    return PlanSpec(
        stages=one,
        tokens_per_expert_per_sample=1.0,
        num_layers=layers,
        max_samples=8,
        max_r2=4,
        has_shared=False,
    )


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([Order.ASAS, Order.AASS]),
)
def test_equal_layers_match_one_schedule(
    costs: list[float], r1: int, r2: int, order: Order
) -> None:
    """Different layers lie between all of the cheapest and all of the most expensive."""
    plan = Plan(r1=r1, r2=r2, ma=2, order=order)

    def alike(cost: float) -> float:
        return makespan_ms(schedule_of(spec(stages(cost), len(costs)), plan))

    one = schedule_of(spec(stages(costs[0]), len(costs)), plan)
    assert makespan_of_layers_ms([one] * len(costs)) == pytest.approx(alike(costs[0]))
    assert makespan_of_layers_ms([one] * len(costs)) == pytest.approx(replay(one).makespan_ms)
    mixed = [schedule_of(spec(stages(cost), len(costs)), plan) for cost in costs]
    found = makespan_of_layers_ms(mixed)
    assert alike(min(costs)) * (1 - 1e-9) <= found <= alike(max(costs)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("micro_batches", "costs", "least", "most"),
    [
        pytest.param(1, (0.1, 3.1), 1.0, 1.0, id="nothing overlaps: sums are sums"),
        pytest.param(4, (1.2, 3.8), 1.0, 1.01, id="experts limit in every layer"),
        pytest.param(2, (0.1, 3.1), 1.3, 1.5, id="now one stage limits, now another"),
    ],
)
def test_mean_of_layers_underestimates_alternating_bottlenecks(
    micro_batches: int, costs: tuple[float, float], least: float, most: float
) -> None:
    """costs: ms of experts per sample, alternating; attention takes 1.5."""
    layers = tuple(stages(cost) for cost in costs) * 20
    mean = spec(stages(sum(costs) / 2), 40)
    plan = Plan(ma=2, r1=micro_batches)
    planned = PlannedBatch(plan, makespan_ms(schedule_of(mean, plan)), 2 * micro_batches)
    ratio = with_overhead(planned, mean, layers).makespan_ms / planned.makespan_ms
    assert least * (1 - 1e-9) <= ratio <= most * (1 + 1e-9)


def test_split_with_uneven_layers_is_slower_than_its_mean_predicts() -> None:
    """As many busy layers as idle ones; links take no time."""

    def layers(*loads: float) -> RoutingShape:
        share = RankShare(0.6, 128 / 5)
        return RoutingShape(
            tuple(Spread(5, 26, share, RankShare(0.6, load * 128 / 5)) for load in loads)
        )

    base_workload = workload(with_link(1e-9))
    made = {}
    for name, routing in (("even", layers(1.5)), ("uneven", layers(*(1.0, 2.0) * 47))):
        placed = base_workload._replace(routing_of={5: routing}.__getitem__)
        made[name] = planned_split(placed, placed.deployment(3, 5), best, 8)
    even, uneven = made["even"], made["uneven"]
    assert even.planned is not None
    assert uneven.planned is not None
    assert (even.layers, len(uneven.layers)) == ((), 94)
    assert uneven.samples_per_s <= even.samples_per_s * (1 + 1e-9)
