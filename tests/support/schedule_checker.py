"""Is a timeline a schedule? The constraints of FinDEP's Eq. 5, each by itself.

1-5  one task at a time on each resource (attention and shared expert share one)
6    S(t,i) and A2E(t,i,j) start after A(t,i); where S is part of attention, A2E also after S(t,i)
7    E(t,i,j) starts after A2E(t,i,j), which takes t_a2e(me) (the paper prints ma)
8    E2A(t,i,j) starts after E(t,i,j)
9    A(t+1,i) starts after S(t,i) and after E2A(t,i,j) for every j
10   every task once and as long as planned: no token is lost (me*r2*E = ma*ag*K*S)
"""

import itertools
from collections.abc import Iterator, Sequence

from contracts.traces import Stage, TaskSpan
from planner.schedule.schedule import Schedule

_Key = tuple[Stage, int, int, int]  # stage, layer, micro-batch, token group
_TOLERANCE = 1e-9  # of the latest end: rounding


def violations(schedule: Schedule, spans: Sequence[TaskSpan]) -> list[str]:
    """What is wrong with `spans` as a timeline of `schedule`, a sentence each; empty if nothing."""
    by_key = {_key(span): span for span in spans}
    slack_s = _TOLERANCE * max((span.end_s for span in spans), default=0.0)
    found = list(_missing_or_wrong(schedule, spans, slack_s))
    found.extend(_overlaps(spans, slack_s))
    for before, after in _precedences(schedule):
        first, second = by_key.get(before), by_key.get(after)
        if first is not None and second is not None and second.start_s < first.end_s - slack_s:
            found.append(
                f"{_name(after)} starts at {second.start_s * 1e3:g} ms, "
                f"before {_name(before)} ends at {first.end_s * 1e3:g} ms"
            )
    return found


def _key(span: TaskSpan) -> _Key:
    return (span.stage, span.layer, span.micro_batch, span.token_group)


def _name(key: _Key) -> str:
    stage, layer, micro_batch, group = key
    return f"{stage.value} of layer {layer}, micro-batch {micro_batch}, token group {group}"


def _lengths(schedule: Schedule) -> Iterator[tuple[_Key, float]]:
    """Every task of the schedule with its length in ms."""
    for layer in range(schedule.num_layers):
        for index, times in enumerate(schedule.micro_batches):
            yield (Stage.ATTENTION, layer, index, 0), times.attention_ms
            if times.shared_ms:
                yield (Stage.SHARED, layer, index, 0), times.shared_ms
            groups = [group for group in times.groups for _ in range(group.repeats)]
            for number, group in enumerate(groups):
                yield (Stage.A2E, layer, index, number), group.a2e_ms
                yield (Stage.EXPERT, layer, index, number), group.expert_ms
                yield (Stage.E2A, layer, index, number), group.e2a_ms


def _missing_or_wrong(
    schedule: Schedule, spans: Sequence[TaskSpan], slack_s: float
) -> Iterator[str]:
    expected = dict(_lengths(schedule))
    seen: set[_Key] = set()
    for span in spans:
        key = _key(span)
        if key in seen or key not in expected:
            yield f"{_name(key)} is there {'twice' if key in seen else 'but not in the plan'}"
            continue
        seen.add(key)
        planned_s = expected[key] / 1e3
        if abs(span.end_s - span.start_s - planned_s) > slack_s:
            actual_ms = (span.end_s - span.start_s) * 1e3
            yield f"{_name(key)} takes {actual_ms:g} ms, not {expected[key]:g} ms"
        if span.start_s < -slack_s:
            yield f"{_name(key)} starts at {span.start_s * 1e3:g} ms, before 0"
    yield from (f"{_name(key)} is missing" for key in expected if key not in seen)


def _overlaps(spans: Sequence[TaskSpan], slack_s: float) -> Iterator[str]:
    ordered = sorted(spans, key=lambda span: (span.resource, span.start_s, span.end_s))
    for first, second in itertools.pairwise(ordered):
        if first.resource == second.resource and second.start_s < first.end_s - slack_s:
            yield (
                f"{_name(_key(second))} starts at {second.start_s * 1e3:g} ms on {first.resource}, "
                f"where {_name(_key(first))} runs until {first.end_s * 1e3:g} ms"
            )


def _precedences(schedule: Schedule) -> Iterator[tuple[_Key, _Key]]:
    """(task, task that must not start before it has ended), rules 6 to 9."""
    folded = schedule.order.shared_before_dispatch
    for layer in range(schedule.num_layers):
        for index, times in enumerate(schedule.micro_batches):
            attention = (Stage.ATTENTION, layer, index, 0)
            shared = (Stage.SHARED, layer, index, 0)
            following = (Stage.ATTENTION, layer + 1, index, 0)
            yield attention, shared
            yield shared, following
            for number in range(sum(group.repeats for group in times.groups)):
                a2e = (Stage.A2E, layer, index, number)
                expert = (Stage.EXPERT, layer, index, number)
                e2a = (Stage.E2A, layer, index, number)
                yield attention, a2e
                if folded:
                    yield shared, a2e
                yield a2e, expert
                yield expert, e2a
                yield e2a, following
