"""Stage times taken from spans: of a replayed plan they are the plan's own."""

import pytest

from benchmarks.support.stage_times import Samples, makespan_ms, micro_batches, stage_samples
from contracts.plan import Order, Plan
from contracts.traces import Stage, TaskSpan
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule, replay

SAMPLES = Samples(4, 64)
TIMES = MicroBatchTimes(5.0, 2.0, (GroupRun(2, 3.0, 4.0, 1.0),))
TASK_MS = {
    Stage.ATTENTION: 5.0,
    Stage.SHARED: 2.0,
    Stage.A2E: 3.0,
    Stage.EXPERT: 4.0,
    Stage.E2A: 1.0,
}


def replayed(plan: Plan) -> list[TaskSpan]:
    schedule = Schedule((TIMES,) * plan.r1, 3, plan.order, plan.shared_lag)
    return replay(schedule).spans


@pytest.mark.parametrize("plan", [Plan(r1=2, r2=2), Plan(r1=4, r2=2, order=Order.AASS)])
def test_tasks_of_a_replayed_plan_take_the_planned_times(plan: Plan) -> None:
    samples = stage_samples(replayed(plan), plan, SAMPLES)
    assert {sample.stage for sample in samples} == set(TASK_MS)
    for sample in samples:
        assert sample.ms == pytest.approx(TASK_MS[sample.stage])


def test_what_a_rank_does_after_a_task_is_part_of_it() -> None:
    plan = Plan(order=Order.ASAS)
    spans = [
        TaskSpan("attention-0", Stage.ATTENTION, 1.0, 1.5, layer=0),
        TaskSpan("attention-0", Stage.SEND, 1.5, 1.7, layer=0),
    ]
    (attention,) = stage_samples(spans, plan, SAMPLES)
    assert attention.ms == pytest.approx(700.0)


def test_a_packet_behind_another_one_takes_only_its_own_time() -> None:
    spans = [
        TaskSpan("attention-0>expert-0", Stage.A2E, 1.0, 1.3, token_group=0),
        TaskSpan("attention-0>expert-0", Stage.A2E, 1.0, 1.6, token_group=1),
    ]
    times = [s.ms for s in stage_samples(spans, Plan(r2=2), SAMPLES)]
    assert times == pytest.approx([300.0, 300.0])


def test_task_beside_the_other_group_has_its_overlap_fraction() -> None:
    spans = [
        TaskSpan("attention-0", Stage.ATTENTION, 1.0, 2.0),
        TaskSpan("expert-0", Stage.EXPERT, 1.5, 2.5),
    ]
    attention, expert = stage_samples(spans, Plan(), SAMPLES)
    assert attention.beside_fraction == pytest.approx(0.5)
    assert expert.beside_fraction == pytest.approx(0.5)


def test_a_makespan_ends_with_the_last_answer_of_the_experts() -> None:
    spans = [
        TaskSpan("attention-0", Stage.ATTENTION, 1.0, 2.0),
        TaskSpan("expert-0>attention-0", Stage.E2A, 2.0, 2.5),
        TaskSpan("attention-0", Stage.FINISH, 2.5, 9.0),
    ]
    assert makespan_ms(spans) == pytest.approx(1500.0)


def test_micro_batches_are_chunks_of_groups_in_order() -> None:
    plan = Plan(r1=4, ma=2, sequence_chunks=(0.25, 1.0))
    first, second = ((0, 16),) * 2, ((16, 64),) * 2
    assert micro_batches(plan, SAMPLES) == [first, second, first, second]
