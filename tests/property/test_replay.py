"""Closed forms and recurrence against the replay, the replay against the constraints."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contracts.plan import Order, Plan
from contracts.traces import Stage, TaskSpan
from planner.costs.stages import PlanSpec
from planner.schedule.closed_forms import aass_makespan, asas_makespan, layer_times, pppipe_makespan
from planner.schedule.exposed_communication import busy_seconds
from planner.schedule.recurrence import makespan_ms
from planner.schedule.replay import ATTENTION_GROUP, RESOURCES, replay
from planner.schedule.schedule import Schedule, schedule_of, token_groups
from tests.property.planning import plans, schedules, specs
from tests.support.ready_set_replay import replay_ready_set
from tests.support.schedule_checker import violations

FORMS = {
    Order.NAIVE: pppipe_makespan,
    Order.PPPIPE: pppipe_makespan,
    Order.ASAS: asas_makespan,
    Order.AASS: aass_makespan,
}


def closed_form(spec: PlanSpec, plan: Plan) -> float:
    assert plan.ma is not None
    _, *group = token_groups(spec, plan.ma, plan.r2)
    attention, shared = spec.stages.attention.at(plan.ma), spec.shared.at(plan.ma)
    times = layer_times(attention, shared, (group[0], group[1], group[2]), plan.r2)
    return float(FORMS[plan.order](times, plan.r1, spec.num_layers))


@pytest.mark.parametrize("order", list(Order))
@given(data=st.data())
def test_closed_form_equals_replay(order: Order, data: st.DataObject) -> None:
    spec, plan = data.draw(specs()), data.draw(plans(order))
    replayed = replay(schedule_of(spec, plan)).makespan_ms
    assert closed_form(spec, plan) == pytest.approx(replayed, rel=1e-9)


@given(schedules())
def test_recurrence_equals_replay(schedule: Schedule) -> None:
    assert makespan_ms(schedule) == pytest.approx(replay(schedule).makespan_ms, rel=1e-9)


@given(schedules(), st.integers(20, 60))
def test_recurrence_equals_replay_of_deep_models(schedule: Schedule, num_layers: int) -> None:
    deep = schedule._replace(num_layers=num_layers)
    assert makespan_ms(deep) == pytest.approx(replay(deep).makespan_ms, rel=1e-9)


@given(schedules())
def test_replay_violates_no_constraint(schedule: Schedule) -> None:
    assert violations(schedule, replay(schedule).spans) == []


@given(schedules())
def test_ready_set_replay_violates_no_constraint(schedule: Schedule) -> None:
    assert violations(schedule, replay_ready_set(schedule).spans) == []


@given(specs(), plans(Order.ASAS))
def test_a_ready_set_follows_the_static_order_under_asas(spec: PlanSpec, plan: Plan) -> None:
    schedule = schedule_of(spec, plan)
    assert replay_ready_set(schedule).spans == replay(schedule).spans


@given(schedules())
def test_busy_time_of_a_resource_is_within_the_makespan(schedule: Schedule) -> None:
    result = replay(schedule)
    for resource in RESOURCES:
        assert result.busy_ms[resource] <= result.makespan_ms * (1 + 1e-9)
    compute = (Stage.ATTENTION, Stage.SHARED)
    busy_ms = busy_seconds(result.spans, compute) * 1e3
    assert busy_ms == pytest.approx(result.busy_ms[ATTENTION_GROUP])


@given(schedules())
def test_some_resource_is_always_busy(schedule: Schedule) -> None:
    result = replay(schedule)
    compute = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT)
    covered_ms = busy_seconds(result.spans, compute) * 1e3 + result.exposed_ms
    assert covered_ms == pytest.approx(result.makespan_ms)


def _moved(span: TaskSpan, by_s: float) -> TaskSpan:
    return msgspec.structs.replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)


@given(schedules(), st.data())
def test_early_task_is_found(schedule: Schedule, data: st.DataObject) -> None:
    spans = replay(schedule).spans
    index = data.draw(st.integers(0, len(spans) - 1))
    end_s = max(span.end_s for span in spans)
    # The replay is tight: nothing can start earlier while the rest stays. A task of no length can.
    assume(spans[index].end_s - spans[index].start_s > 1e-6 * end_s)
    spans[index] = _moved(spans[index], -1e-3 * (spans[index].end_s - spans[index].start_s))
    assert violations(schedule, spans)


@given(schedules(), st.data())
def test_missing_duplicate_or_short_task_is_found(schedule: Schedule, data: st.DataObject) -> None:
    spans = replay(schedule).spans
    index = data.draw(st.integers(0, len(spans) - 1))
    span = spans[index]
    assume(span.end_s > span.start_s)
    short = msgspec.structs.replace(span, end_s=(span.start_s + span.end_s) / 2)
    for planted in ([], [span, span], [short]):
        assert violations(schedule, [*spans[:index], *planted, *spans[index + 1 :]])
