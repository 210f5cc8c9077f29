"""Violations of each constraint of FinDEP's Eq. 5."""

from __future__ import annotations

import re

import msgspec
import pytest

from contracts.plan import Order
from contracts.traces import Stage, TaskSpan
from planner.schedule.replay import A2E_LINK, E2A_LINK, EXPERT_GROUP, replay
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule
from tests.support.schedule_checker import violations

ATTENTION_GROUP = "attention-0"
TIMES = MicroBatchTimes(4.0, 2.0, (GroupRun(1, 3.0, 5.0, 1.0),))


def timeline(schedule: Schedule, **starts_ms: float) -> list[TaskSpan]:
    """Return one micro-batch's spans in one layer with the given starts."""
    lengths_ms = {"attention": 4.0, "shared": 2.0, "a2e": 3.0, "expert": 5.0, "e2a": 1.0}
    resources = (ATTENTION_GROUP, ATTENTION_GROUP, A2E_LINK, EXPERT_GROUP, E2A_LINK)
    return [
        TaskSpan(
            resource, Stage(stage), starts_ms[stage] / 1e3, (starts_ms[stage] + length_ms) / 1e3
        )
        for resource, (stage, length_ms) in zip(resources, lengths_ms.items(), strict=True)
    ]


GOOD = {"attention": 3.0, "shared": 7.0, "a2e": 7.0, "expert": 10.0, "e2a": 15.0}
ONE = Schedule((TIMES,), 1, Order.ASAS, 0, 1)


def test_valid_timeline_has_no_violations() -> None:
    assert violations(ONE, timeline(ONE, **GOOD)) == []


@pytest.mark.parametrize(
    ("stage", "start_ms", "message"),
    [
        ("shared", 0.0, "shared .* starts at 0 ms, before attention"),
        ("a2e", 6.0, "a2e .* starts at 6 ms, before attention"),
        ("expert", 9.0, "expert .* starts at 9 ms, before a2e"),
        ("e2a", 14.0, "e2a .* starts at 14 ms, before expert"),
        ("attention", -1.0, "attention .* starts at -1 ms, before 0"),
    ],
)
def test_violated_dependency_is_named(stage: str, start_ms: float, message: str) -> None:
    (found,) = violations(ONE, timeline(ONE, **(GOOD | {stage: start_ms})))
    assert re.match(message, found)


def test_a2e_before_the_shared_expert_breaks_pppipe_only() -> None:
    pppipe = ONE._replace(order=Order.PPPIPE)
    assert violations(ONE, timeline(ONE, **GOOD)) == []
    assert violations(pppipe, timeline(pppipe, **GOOD))


@pytest.mark.parametrize("stage", [Stage.SHARED, Stage.E2A])
def test_next_layer_waits_for_shared_expert_and_replies(stage: Stage) -> None:
    schedule = ONE._replace(num_layers=2)
    spans = replay(schedule).spans
    index = next(i for i, s in enumerate(spans) if s.stage is stage and s.layer == 0)
    late_s = spans[-1].end_s
    spans[index] = msgspec.structs.replace(
        spans[index],
        start_s=late_s,
        end_s=late_s + spans[index].end_s - spans[index].start_s,
    )
    found = violations(schedule, spans)
    assert any(f"before {stage.value} of layer 0" in sentence for sentence in found)


def test_overlapping_tasks_on_a_resource_are_named() -> None:
    schedule = ONE._replace(micro_batches=(TIMES, TIMES))
    spans = [
        msgspec.structs.replace(span, micro_batch=index)
        for index in range(2)
        for span in timeline(ONE, **GOOD)
    ]
    found = violations(schedule, spans)
    for resource in (ATTENTION_GROUP, A2E_LINK, EXPERT_GROUP, E2A_LINK):
        assert any(f"on {resource}, where" in sentence for sentence in found)
