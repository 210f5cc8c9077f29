"""Schedules of plans, hand-made replays, splits of N devices, and layers of different routing."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fleet.hardware import load_hardware
from contracts.errors import ResourceError
from contracts.hardware import Hardware, LinkCost
from contracts.plan import Order, Plan
from contracts.traces import Stage
from planner.costs.routing_shape import RankShare, RoutingShape, Spread
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.slots import LayerSlots
from planner.schedule.alternatives import Workload, alternatives
from planner.schedule.deployment_search import (
    Split,
    busy_fractions,
    planned_split,
    search,
    with_overhead,
)
from planner.schedule.placed_routing import spread_of
from planner.schedule.recurrence import makespan_ms, makespan_of_layers_ms
from planner.schedule.schedule import (
    EXPERT_GROUP,
    GroupRun,
    MicroBatchTimes,
    Schedule,
    replay,
    schedule_of,
)
from planner.schedule.solver import PlannedBatch, solve
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape
from tests.support.spans import busy_ms, exposed_communication

SPEC = PlanSpec(
    stages=StageModels(
        attention=Linear(1.0, 2.0),
        shared=Linear(0.5, 1.0),
        expert=Linear(0.6, 0.1),
        a2e=Linear(0.1, 0.05),
        e2a=Linear(0.2, 0.025),
    ),
    tokens_per_expert_per_sample=12.0,
    num_layers=2,
    max_samples=8,
    max_r2=8,
    has_shared=True,
    attention_quadratic_fraction=0.5,
)


def test_micro_batch_times_follow_samples_and_groups_follow_tokens() -> None:
    (times,) = schedule_of(SPEC, Plan(ma=2, r2=4)).micro_batches
    assert (times.attention_ms, times.shared_ms) == (5.0, 2.5)
    (group,) = times.groups
    assert tuple(group) == pytest.approx((4, 0.4, 1.2, 0.35))
    short = schedule_of(SPEC, Plan(r1=3, micro_batch_samples=(3, 3, 1)))
    assert [times.attention_ms for times in short.micro_batches] == [7.0, 7.0, 3.0]
    with pytest.raises(ValueError, match="ma is missing"):
        schedule_of(SPEC, Plan())


def test_later_chunks_of_a_sequence_attend_to_earlier_ones() -> None:
    plan = Plan(ma=2, r1=2, sequence_chunks=(0.5, 1.0))
    first, second = schedule_of(SPEC, plan).micro_batches
    assert first.attention_ms == pytest.approx(1 + 4 * (0.5 * 0.5 + 0.5 * 0.25))
    assert second.attention_ms == pytest.approx(1 + 4 * (0.5 * 0.5 + 0.5 * 0.75))
    assert first.shared_ms == second.shared_ms == pytest.approx(0.5 + 1.0)
    reads = msgspec.structs.replace(SPEC, attention_chunk_ms=0.25, attention_context_ms=2.0)
    plan = Plan(ma=2, r1=4, sequence_chunks=(0.25, 0.5, 0.75, 1.0))
    pairs = zip(*(schedule_of(spec, plan).micro_batches for spec in (reads, SPEC)), strict=True)
    extra_ms = [dearer.attention_ms - plain.attention_ms for dearer, plain in pairs]
    assert extra_ms == [pytest.approx(2 * ms) for ms in (0.0, 1.25, 1.75, 2.25)]


def test_naive_makespan_is_the_sum_of_its_tasks() -> None:
    result = replay(schedule_of(SPEC, Plan(ma=1, order=Order.NAIVE)))
    layer_ms = 3.0 + 1.5 + (0.1 + 0.6) + (0.6 + 1.2) + (0.2 + 0.3)
    assert result.makespan_ms == pytest.approx(2 * layer_ms)
    assert 1e3 * exposed_communication(result.spans) == pytest.approx(2 * 1.2)
    assert busy_ms(result.spans, EXPERT_GROUP) == pytest.approx(2 * 1.8)


#   A 4, S 2, A2E 1, E 3, E2A 1 of each micro-batch
TIMES = MicroBatchTimes(4.0, 2.0, (GroupRun(1, 1.0, 3.0, 1.0),))


def starts_ms(schedule: Schedule, stage: Stage) -> list[float]:
    return [span.start_s * 1e3 for span in replay(schedule).spans if span.stage is stage]


def test_starts_of_aass_and_of_late_shared_experts() -> None:
    schedule = Schedule((TIMES, TIMES), 2, Order.AASS, 0)
    assert starts_ms(schedule, Stage.ATTENTION) == pytest.approx([0.0, 4.0, 12.0, 16.0])
    assert starts_ms(schedule, Stage.SHARED) == pytest.approx([8.0, 10.0, 20.0, 22.0])
    assert starts_ms(schedule, Stage.E2A) == pytest.approx([8.0, 12.0, 20.0, 24.0])
    late = Schedule((TIMES, TIMES), 2, Order.ASAS, 1)  # shared experts, into the next layer
    assert starts_ms(late, Stage.ATTENTION) == pytest.approx([0.0, 4.0, 10.0, 16.0])
    assert starts_ms(late, Stage.SHARED) == pytest.approx([8.0, 14.0, 20.0, 22.0])


H200 = load_hardware("h200-node")
GIB = float(1 << 30)


def workload(
    hardware: Hardware = H200, *, devices: int = 8, tokens: int = 2048, usable_gib: float = 118.0
) -> Workload:
    return Workload(shape(QWEN3_235B), hardware, devices, tokens, 0, usable_gib * GIB)


def with_link(ms_per_byte: float) -> Hardware:
    link = LinkCost(backend="nccl", direction="both", alpha_ms=0.02, ms_per_byte=ms_per_byte)
    return msgspec.structs.replace(H200, links=[link])


SLOW = with_link(1e-5)


def best(spec: PlanSpec) -> PlannedBatch:
    return solve(spec).best


def test_best_split_has_most_samples_per_second_of_all_attention_ranks() -> None:
    verdict = search(workload(), best)
    assert len(verdict.splits) == 7
    assert verdict.best.samples_per_s == max(split.samples_per_s for split in verdict.splits)
    ranks = verdict.best.deployment
    assert ranks.attention_ranks + ranks.expert_ranks == 8
    for split in verdict.splits:
        if split.planned is not None:
            ranks = split.deployment
            whole = ranks.attention_ranks * split.planned.samples / split.planned.makespan_ms * 1e3
            assert split.samples_per_s == pytest.approx(whole)
            assert all(0 < part <= 1 + 1e-9 for part in busy_fractions(split).values())
    last = verdict.splits[-1]
    assert last.planned is None
    assert "expert_ranks" in last.problem
    assert "would fit" in last.problem


def test_advice_is_to_split_if_only_a_split_fits() -> None:
    """Without a split each device holds attention and a share of the experts."""
    model = shape(DEEPSEEK_V2, num_hidden_layers=12, moe_intermediate_size=2048)
    small = Workload(model, H200, 8, 512, 0, 18.0 * GIB)
    verdict = search(small, best)
    assert [other.samples_per_s for other in alternatives(small)] == [0.0, 0.0]
    assert verdict.disaggregate
    assert verdict.advice.startswith("Disaggregate")


def test_advice_follows_the_rates_and_names_a_slow_link() -> None:
    for hardware in (H200, with_link(1e-7), SLOW):
        tokens = 256 if hardware is SLOW else 2048
        verdict = search(workload(hardware, tokens=tokens), best)
        rival = max(other.samples_per_s for other in verdict.others)
        assert verdict.disaggregate == (verdict.best.samples_per_s > rival)
    assert "Do not disaggregate here" in verdict.advice
    assert "links" in verdict.advice
    with pytest.raises(ResourceError, match=r"devices=8: no split fits; 1 \+ 7"):
        search(workload(usable_gib=20.0), best)


def test_alternatives_have_the_volumes_of_table_1() -> None:
    """On links so slow that nothing else counts. All-gather: (N-1)/N of a layer's weights. Two
    all-to-alls: of a device's tokens, a copy for each of the other devices that has work for it."""
    per_byte, devices, tokens = 1.0, 8, 64
    slow = workload(with_link(per_byte), tokens=tokens)._replace(max_samples=1)
    exchange, gather = alternatives(slow)
    layer_bytes = 128 * 3 * 4096 * 1536 * 2
    assert gather.makespan_ms == pytest.approx(93 * layer_bytes * 7 / 8 * per_byte, rel=1e-3)
    missed = 1.0
    for chosen in range(8):
        missed *= (128 - 16 - chosen) / (128 - chosen)
    rows = tokens * (devices - 1) * (1 - missed)
    pairs = tokens * 8 * 7 / 8
    exchanged = 94 * (2 * rows * 4096 * 2 + 8 * pairs) * per_byte
    assert exchange.makespan_ms == pytest.approx(exchanged, rel=1e-3)


NONE = np.zeros(0, np.int64)


def routing_of(sets: object, experts: int) -> LayerRouting:
    sets_PK, counts = np.array(sets, np.int64), TokenCounts(NONE, NONE, NONE)
    return LayerRouting(experts, sets_PK, np.zeros(len(sets_PK), np.int64), counts)


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
    """Expert 0 is on both ranks, token t lives on rank t % 2: one of four copies leaves.

    Without replicas the second rank has 3 of 4 tokens and 5 of 8 pairs.
    """
    routing = routing_of([[0, 1], [2, 3], [3, 2], [0, 3]], 4)
    spread = spread_of(routing, LayerSlots(range(4), [(0, 2), (2, 4)]))
    assert (spread.copies, spread.load, spread.slots, spread.ranks) == (5 / 4, 5 / 4, 2, 2)
    assert spread.busiest == RankShare(3 / 4, 5 / 8 * 4)
    routing = routing_of([[0, 1], [0, 2], [0, 3], [0, 2]], 4)
    spread = spread_of(routing, LayerSlots([0, 1, 0, 2, 3], [(0, 2), (2, 5)]))
    assert spread.copies == 4 / 4
    assert spread.at_home == 2 * (1 - 1 / 4)
    once = spread_of(routing, LayerSlots(range(4), [(0, 2), (2, 4)]))
    assert once.at_home == 1
    everywhere = spread_of(routing, LayerSlots([0, 1, 2, 3] * 2, [(0, 4), (4, 8)]))
    assert everywhere.at_home == 2  # nothing leaves
    with pytest.raises(ValueError, match="without tokens"):
        spread_of(routing_of([], 4), LayerSlots(range(4), [(0, 4)]))


def stages(expert_ms: float) -> StageModels:
    link = Linear(0.1, 0.01)
    attention, expert = Linear(1.0, 1.0), Linear(0.1, expert_ms)
    return StageModels(attention=attention, expert=expert, a2e=link, e2a=link)


def spec(one: StageModels, layers: int) -> PlanSpec:
    return PlanSpec(
        stages=one, tokens_per_expert_per_sample=1.0, num_layers=layers, max_samples=8, max_r2=4,
        has_shared=False,
    )  # fmt: skip


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([Order.ASAS, Order.AASS]),
)
def test_equal_layers_equal_one_schedule(
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

    def planned(*loads: float) -> Split:
        rows, pairs = 0.6, 128 / 5
        layers = [
            Spread(5, 26, RankShare(rows, pairs), RankShare(rows, load * pairs)) for load in loads
        ]
        routing = {5: RoutingShape(tuple(layers))}
        placed = workload(with_link(1e-9))._replace(routing_of=routing.__getitem__)
        return planned_split(placed, placed.deployment(3, 5), best, 8)

    even, uneven = planned(1.5), planned(*(1.0, 2.0) * 47)
    assert even.planned is not None
    assert uneven.planned is not None
    assert (even.layers, len(uneven.layers)) == ((), 94)
    assert uneven.samples_per_s <= even.samples_per_s * (1 + 1e-9)
