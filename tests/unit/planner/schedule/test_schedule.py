"""Schedules of plans and hand-made replays."""

from __future__ import annotations

import msgspec
import pytest

from contracts.plan import Order, Plan
from contracts.traces import Stage
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.schedule.replay import EXPERT_GROUP, replay
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule, schedule_of
from tests.support.ready_set_replay import replay_ready_set

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


def test_last_micro_batch_may_be_short() -> None:
    schedule = schedule_of(SPEC, Plan(ma=3, r1=3), samples=7)
    assert [times.attention_ms for times in schedule.micro_batches] == [7.0, 7.0, 3.0]
    assert schedule.samples == 7


def test_later_chunks_of_a_sequence_attend_to_earlier_ones() -> None:
    plan = Plan(ma=2, r1=2, sequence_chunks=(0.5, 1.0))
    first, second = schedule_of(SPEC, plan).micro_batches
    assert first.attention_ms == pytest.approx(1 + 4 * (0.5 * 0.5 + 0.5 * 0.25))
    assert second.attention_ms == pytest.approx(1 + 4 * (0.5 * 0.5 + 0.5 * 0.75))
    assert first.shared_ms == second.shared_ms == pytest.approx(0.5 + 1.0)


def test_later_chunk_costs_reading_earlier_ones() -> None:
    spec = msgspec.structs.replace(SPEC, attention_chunk_ms=0.25, attention_context_ms=2.0)
    plan = Plan(ma=2, r1=4, sequence_chunks=(0.25, 0.5, 0.75, 1.0))
    dearer = schedule_of(spec, plan).micro_batches
    extra_ms = [
        with_reads.attention_ms - without.attention_ms
        for with_reads, without in zip(dearer, schedule_of(SPEC, plan).micro_batches, strict=True)
    ]
    assert extra_ms == [pytest.approx(2 * ms) for ms in (0.0, 1.25, 1.75, 2.25)]


def test_missing_spec_field_is_named() -> None:
    with pytest.raises(ValueError, match="ma is missing"):
        schedule_of(SPEC, Plan())
    with pytest.raises(ValueError, match="samples=9 do not fill r1=2 of ma=4"):
        schedule_of(SPEC, Plan(ma=4, r1=2), samples=9)


def test_naive_makespan_is_the_sum_of_its_tasks() -> None:
    result = replay(schedule_of(SPEC, Plan(ma=1, order=Order.NAIVE)))
    layer_ms = 3.0 + 1.5 + (0.1 + 0.6) + (0.6 + 1.2) + (0.2 + 0.3)
    assert result.makespan_ms == pytest.approx(2 * layer_ms)
    assert result.exposed_ms == pytest.approx(2 * 1.2)
    assert result.busy_ms[EXPERT_GROUP] == pytest.approx(2 * 1.8)


#   A 4, S 2, A2E 1, E 3, E2A 1 of each micro-batch
TIMES = MicroBatchTimes(4.0, 2.0, (GroupRun(1, 1.0, 3.0, 1.0),))


def starts_ms(schedule: Schedule, stage: Stage) -> list[float]:
    return [span.start_s * 1e3 for span in replay(schedule).spans if span.stage is stage]


def test_aass_runs_all_attention_of_layer_first() -> None:
    schedule = Schedule((TIMES, TIMES), 2, Order.AASS, 0, 2)
    assert starts_ms(schedule, Stage.ATTENTION) == pytest.approx([0.0, 4.0, 12.0, 16.0])
    assert starts_ms(schedule, Stage.SHARED) == pytest.approx([8.0, 10.0, 20.0, 22.0])
    assert starts_ms(schedule, Stage.E2A) == pytest.approx([8.0, 12.0, 20.0, 24.0])


def test_late_shared_experts_run_into_the_next_layer() -> None:
    schedule = Schedule((TIMES, TIMES), 2, Order.ASAS, 1, 2)
    assert starts_ms(schedule, Stage.ATTENTION) == pytest.approx([0.0, 4.0, 10.0, 16.0])
    assert starts_ms(schedule, Stage.SHARED) == pytest.approx([8.0, 14.0, 20.0, 22.0])


def test_a_ready_set_fills_a_gap_of_aass_with_a_shared_expert() -> None:
    times = MicroBatchTimes(1.0, 1.0, (GroupRun(1, 2.0, 1.0, 2.0),))
    schedule = Schedule((times,) * 3, 3, Order.AASS, 0, 3)
    assert replay(schedule).makespan_ms == pytest.approx(24)
    assert replay_ready_set(schedule).makespan_ms == pytest.approx(22)


def test_ready_set_can_be_slower_than_static_order() -> None:
    times = MicroBatchTimes(1.0, 2.0, (GroupRun(1, 2.0, 1.0, 2.0),))
    schedule = Schedule((times,) * 2, 2, Order.AASS, 0, 2)
    assert replay(schedule).makespan_ms == pytest.approx(14)
    assert replay_ready_set(schedule).makespan_ms == pytest.approx(15)
