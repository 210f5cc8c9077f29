"""Capacity predicted from light traffic against simulated saturated groups."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from contracts.hardware import ExpertCost, Hardware
from contracts.plan import Plan
from contracts.planner_messages import BatchReport, ExpertReport, MicroBatchReport, TrafficReport
from planner.costs.cost_model import Deployment, resized
from planner.costs.stages import Linear, StageModels
from planner.online import capacity as capacities
from planner.online.capacity import (
    Batch,
    Capacity,
    PrefillCapacity,
    ReferenceCurve,
    ReferenceTime,
    TrafficMix,
    capacity,
    plan_inefficiency,
)
from planner.online.planner import OnlinePlanner
from planner.schedule.batch_plan import planned_batch, replayed_ms
from tests.support.model_shapes import QWEN3_235B, shape
from tests.support.simulated_group import hardware, setup_of
from tests.support.simulated_serving import Report, SimulatedServing, Traffic

SHAPE = shape(QWEN3_235B, hidden_size=512, num_hidden_layers=4, num_experts=16)
MAX_SEQUENCES = 24
WITHIN = 0.15
LIGHT = 0.4  # of what would go
DECODES = TrafficMix(240.0, 240.0 * 64, 0.0, 0.0, 0.0, MAX_SEQUENCES)


def machine(expert_slower: float) -> Hardware:
    """Return `hardware()` three times as slow, with even slower experts."""
    costs = ExpertCost(call_ms=0.3, expert_ms=0.06, ms_per_flop=6e-9 * expert_slower)
    return msgspec.structs.replace(hardware(slower=3.0), expert=costs)


class Case(NamedTuple):
    ranks: tuple[int, int]
    expert_slower: float
    prompt_tokens: int
    output_tokens: int


CASES = {
    "experts limit": Case((2, 1), 3.0, 32, 16),
    "attention limits": Case((1, 2), 0.5, 64, 16),
    "prompts mostly": Case((1, 1), 1.0, 128, 4),
    "both": Case((2, 2), 2.0, 24, 12),
}

SLOW = {"attention limits", "both"}


def at_most_per_s(case: Case, ranks: tuple[int, int]) -> float:
    """Return the best rate over some plans."""
    rates = []
    for micro_batches in (1, 2, 4):
        world = world_of(case, ranks, None, most_micro_batches=micro_batches)
        world.run(15.0)
        rates.append(world.run(30.0))
    return max(rates)


def world_of(
    case: Case, ranks: tuple[int, int], per_s: float | None, **options: Any
) -> SimulatedServing:
    traffic = Traffic(case.prompt_tokens, case.output_tokens, per_s)
    slower = machine(case.expert_slower)
    return SimulatedServing(SHAPE, slower, ranks, traffic, max_sequences=MAX_SEQUENCES, **options)


def capacity_from_light_traffic(case: Case, per_s: float) -> Capacity:
    ag, eg = case.ranks
    planner = OnlinePlanner(setup_of(SHAPE, None, attention_ranks=ag, expert_ranks=eg))
    seen = capacities.Traffic(MAX_SEQUENCES)

    def report(what: Report, now_s: float) -> None:
        if isinstance(what, TrafficReport):
            seen.add(what, now_s)
        elif isinstance(what, ExpertReport):
            planner.observe_experts(what)
        elif isinstance(what, BatchReport):
            planner.observe_batch(what)
            planner.observe_solo_batch(what)

    world = world_of(case, case.ranks, per_s, report=report)
    world.run(20.0)
    mix = seen.mix(world.now_ms / 1e3, ag)
    found = capacity(planner.group(mix), mix)
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_headroom_and_gain_of_one_rank_match_simulation(name: str) -> None:
    case = CASES[name]
    ag, eg = case.ranks
    now = at_most_per_s(case, case.ranks)
    per_s = LIGHT * now
    found = capacity_from_light_traffic(case, per_s)
    assert per_s / found.used_fraction == pytest.approx(now, rel=WITHIN)
    for kind, ranks in (("attention", (ag + 1, eg)), ("expert", (ag, eg + 1))):
        then = at_most_per_s(case, ranks)
        assert now * (1 + found.gains[kind]) == pytest.approx(then, rel=WITHIN)


def test_resize_to_own_size_is_identity_and_growth_lowers_times() -> None:
    link = Linear(0.1, 1.0)
    model = StageModels(attention=Linear(1.0, 2.0), expert=Linear(0.5, 4.0), a2e=link, e2a=link)
    now = Deployment(attention_ranks=2, expert_ranks=2, sequence_tokens=1)
    assert resized(model, SHAPE, now, now) == model
    more = Deployment(attention_ranks=2, expert_ranks=4, sequence_tokens=1)
    then = resized(model, SHAPE, now, more)
    assert then.expert == Linear(0.25, 2.0)
    assert then.attention == model.attention
    setup = setup_of(SHAPE, hardware(), attention_ranks=1, expert_ranks=1)
    group = OnlinePlanner(setup).group(DECODES)
    alone_ms, both_ms = (
        each.stages.expert.at(each.me(24, 1)) for each in (group.specs[1, 1], group.specs[2, 1])
    )
    assert both_ms == pytest.approx(2 * alone_ms), "packets of two attention ranks are two calls"


def ran(plan: Plan, parts: list[list[tuple[int, int]]], measured_ms: float = 1.0) -> BatchReport:
    times = [MicroBatchReport(part, 1.0) for part in parts]
    return BatchReport(rank="a", plan=plan, measured_ms=measured_ms, micro_batches=times)


def test_time_between_batches_reduces_capacity() -> None:
    used = {}
    for between_ms in (0.0, 5.0):
        planner = OnlinePlanner(setup_of(SHAPE, hardware()))
        for sequences in range(1, 25):
            report = ran(Plan(), [[(8, 9)] * sequences], 20.0)
            planner.observe_solo_batch(msgspec.structs.replace(report, between_ms=between_ms))
        found = capacity(planner.group(DECODES), DECODES)
        assert found is not None
        used[between_ms] = found.used_fraction
    batches_per_s = DECODES.decode_tokens / MAX_SEQUENCES
    assert used[5.0] - used[0.0] == pytest.approx(batches_per_s * 5e-3, rel=0.05)


def test_poorly_cut_batches_raise_inefficiency() -> None:
    planner = OnlinePlanner(setup_of(SHAPE, hardware()))
    group = planner.group(DECODES)
    batch = [(0, 64)] * 8
    spec = group.specs[group.attention_ranks, group.expert_ranks]
    chunk_ms = group.chunk_times[group.expert_ranks]
    best = planned_batch(spec, batch, chunk_ms)
    one_each = Plan(r1=8)

    assert plan_inefficiency(group, []) == 1.0
    parts = [[chunk] for chunk in batch]
    their_ms = replayed_ms(spec, chunk_ms, one_each, parts)
    longer = plan_inefficiency(group, [ran(one_each, parts)])
    assert longer == pytest.approx(max(1.0, their_ms / best.makespan_ms))
    assert longer > 1
    before, then = (capacity(group, DECODES, of) for of in ([], [ran(one_each, parts)]))
    assert before is not None
    assert then is not None
    assert then.used_fraction > before.used_fraction


def test_mix_includes_idle_ranks_and_excludes_old_reports() -> None:
    seen = capacities.Traffic(64)
    traffic_report = TrafficReport(
        rank="attention-0", seconds=10.0, pool_tokens=1000, decode_tokens=100, positions=10_000
    )
    seen.add(traffic_report, 10.0)
    mix = seen.mix(10.0, attention_ranks=2)
    assert mix.decode_tokens == pytest.approx(5.0)
    assert mix.sequences == 10  # of 100 tokens each
    assert seen.mix(40.0, attention_ranks=2).decode_tokens == pytest.approx(1.25)
    assert seen.mix(71.0, attention_ranks=2).is_empty
    seen.add(TrafficReport(rank="a", seconds=1.0, pool_tokens=0, prompts=5), 100.0)
    mix = seen.mix(100.0, 1)  # prompts of no tokens
    assert capacity(OnlinePlanner(setup_of(SHAPE, hardware())).group(mix), mix) is not None


def small_batches(worker: PrefillCapacity, ms: Callable[[float], float]) -> float:
    """Run 60 s of two prompts of 128 tokens, 1 GFLOP, a second; return used over true fraction."""
    for number in range(1, 61):
        prompts = number % 3 + 1
        worker.add(Batch(float(number), prompts * 1e9, 128 * prompts, prompts, ms(prompts * 1e9)))
    full = 4096 / 128
    return worker.used_fraction(60.0) / (2.0 / (1e3 * full / ms(full * 1e9)))


def test_prefill_worker_predicts_full_batches_from_small_ones() -> None:
    def ms(flops: float) -> float:
        return 20.0 + 10.0 * flops / 1e9

    worker = PrefillCapacity(max_tokens=4096, max_sequences=256, started_s=0.0)
    assert small_batches(worker, ms) == pytest.approx(1.0, rel=0.05)
    assert worker.used_fraction(121.0) == 0.0


def test_reference_curve_predicts_faster_full_batches() -> None:
    """The machine is three times slower than at start, plus 4 ms per batch."""

    def reference_ms(flops: float) -> float:
        return 12.0 * math.pow(flops / 1e9, 0.8)

    def ms(flops: float) -> float:
        return 4.0 + 3.0 * reference_ms(flops)

    worker = PrefillCapacity(max_tokens=4096, max_sequences=256, started_s=0.0)
    sizes = (0.5e9, 1e9, 4e9, 32e9)
    worker.refer([ReferenceTime(flops, reference_ms(flops)) for flops in sizes])
    assert small_batches(worker, ms) == pytest.approx(1.0, rel=WITHIN)


def test_reference_curve_interpolates_and_extrapolates() -> None:
    curve = ReferenceCurve([ReferenceTime(4e9, 30.0), ReferenceTime(1e9, 10.0)])
    assert curve.at(0.0) == curve.at(1e9) == 10.0
    assert curve.at(2.5e9) == pytest.approx(20.0)
    assert curve.at(8e9) == pytest.approx(60.0)
    for nonsense in ([], [ReferenceTime(1e9, 0.0)]):
        with pytest.raises(ValueError, match="reference times"):
            ReferenceCurve(nonsense)
