"""Plans beyond the paper, for finite and ragged batches."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.plan import Order, Plan
from planner.costs.stages import LEAST_ME, Linear, PlanSpec, StageModels
from planner.schedule.batch_plan import NewTokens, plan_batch
from planner.schedule.batch_split import chunk_bounds
from planner.schedule.closed_forms import layer_times, lower_bound
from planner.schedule.extended_plans import (
    ALL_EXTENSIONS,
    PlanExtension,
    solve_extended,
)
from planner.schedule.plan_search import Cut, batch_lower_bound, search
from planner.schedule.recurrence import makespan_ms
from planner.schedule.replay import replay
from planner.schedule.schedule import (
    MicroBatchTimes,
    Schedule,
    pieces_of,
    schedule_of,
    token_groups,
)
from planner.schedule.solver import solve
from tests.property.planning import beyond_plans, specs
from tests.support.ready_set_replay import replay_ready_set
from tests.support.schedule_checker import violations

KINDS = st.sampled_from([PlanExtension.UNEVEN, PlanExtension.CHUNKED, PlanExtension.LATE_SHARED])


@given(specs(max_samples=40), KINDS)
def test_more_extensions_are_never_worse(spec: PlanSpec, kind: PlanExtension) -> None:
    rates = [p.samples_per_s for p in (solve(spec).best, solve_extended(spec, kind))]
    rates.append(solve_extended(spec).samples_per_s)
    assert rates[0] <= rates[1] * (1 + 1e-12)
    assert rates[1] <= rates[2] * (1 + 1e-12)


@given(specs())
def test_extended_plan_makespan_equals_replay(spec: PlanSpec) -> None:
    planned = solve_extended(spec)
    schedule = schedule_of(spec, planned.plan)
    replayed = replay(schedule)
    assert planned.makespan_ms == pytest.approx(replayed.makespan_ms, rel=1e-9)
    assert violations(schedule, replayed.spans) == []
    assert planned.samples == schedule.samples <= spec.max_samples


@pytest.mark.parametrize("max_samples", [5, 7])
def test_each_token_group_of_each_micro_batch_has_a_token_per_expert(max_samples: int) -> None:
    """With free token groups the finest are best, and only this rule limits them."""
    stages = {name: Linear(0.0, 1.0) for name in ("expert", "a2e", "e2a")}
    stages["attention"] = Linear(float(max_samples), 1.0)  # so that two micro-batches are best
    spec = PlanSpec(
        stages=StageModels(**stages),
        tokens_per_expert_per_sample=1.5,
        num_layers=3,
        max_samples=max_samples,
        max_r2=64,
        has_shared=False,
    )
    plan = solve_extended(spec).plan
    assert plan.micro_batch_samples
    for piece in pieces_of(spec, plan, plan.micro_batch_samples):
        assert plan.r2 == 1 or spec.me(piece.amount, plan.r2) >= LEAST_ME


@given(specs(), KINDS)
def test_only_the_requested_extensions_are_used(spec: PlanSpec, kind: PlanExtension) -> None:
    plan = solve_extended(spec, kind).plan
    used = {
        PlanExtension.UNEVEN: bool(plan.micro_batch_samples),
        PlanExtension.CHUNKED: bool(plan.sequence_chunks),
        PlanExtension.LATE_SHARED: bool(plan.shared_lag),
    }
    assert [name for name, there in used.items() if there and name is not kind] == []


@given(specs())
def test_extension_without_numbers_is_left_out(spec: PlanSpec) -> None:
    bare = msgspec.structs.replace(
        spec,
        attention_quadratic_fraction=None,
        has_shared=False,
    )
    plan = solve_extended(bare, ALL_EXTENSIONS).plan
    assert not plan.sequence_chunks
    assert not plan.shared_lag


@given(specs(), st.data())
def test_no_order_of_uneven_micro_batches_beats_their_lower_bound(
    spec: PlanSpec, data: st.DataObject
) -> None:
    plan = data.draw(beyond_plans(spec))
    pieces = pieces_of(spec, plan, plan.micro_batch_samples)
    r2 = np.array([plan.r2])
    bound_ms = batch_lower_bound(spec, pieces, r2)[0]
    choices = data.draw(st.randoms(use_true_random=False))
    schedule = schedule_of(spec, plan)
    for result in (
        replay(schedule),
        replay_ready_set(schedule, policy=lambda ready: choices.choice(list(ready))),
    ):
        assert result.makespan_ms >= bound_ms * (1 - 1e-9)


@given(specs(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_lower_bound_of_equal_micro_batches_equals_closed_form(
    spec: PlanSpec, r1: int, r2: int, ma: int
) -> None:
    _, *group = token_groups(spec, ma, r2)
    attention, shared = spec.stages.attention.at(ma), spec.shared.at(ma)
    times = layer_times(attention, shared, (group[0], group[1], group[2]), r2)
    pieces = pieces_of(spec, Plan(ma=ma, r1=r1), [ma] * r1)
    bound_ms = batch_lower_bound(spec, pieces, np.array([r2]))[0]
    assert bound_ms == pytest.approx(lower_bound(times, r1, spec.num_layers))


def _splits(samples: int) -> set[tuple[int, ...]]:
    """Return sizes that differ by at most one, larger first, or equal ones and a smaller last."""
    parts = (
        sizes
        for r1 in range(1, samples + 1)
        for sizes in itertools.product(range(1, samples + 1), repeat=r1)
        if sum(sizes) == samples
    )
    return {
        s
        for s in parts
        if (max(s) - min(s) <= 1 and list(s) == sorted(s, reverse=True))
        or (len(set(s[:-1])) <= 1 and s[-1] <= s[0])
    }


@given(specs(max_samples=5, max_r2=6), st.data())
def test_no_cut_of_a_finite_batch_beats_the_search(spec: PlanSpec, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, spec.max_samples))
    splits = _splits(samples)
    plans = [Plan(r1=len(s), ma=max(s), micro_batch_samples=s) for s in splits]
    pieces = [pieces_of(spec, plan, s) for plan, s in zip(plans, splits, strict=True)]
    cuts = [Cut(plan, each, samples) for plan, each in zip(plans, pieces, strict=True)]
    planned = search(spec, cuts)
    assert planned.samples == samples
    assert makespan_ms(schedule_of(spec, planned.plan)) == pytest.approx(planned.makespan_ms)
    for sizes, r2, order in itertools.product(
        splits, range(1, spec.max_r2 + 1), (Order.ASAS, Order.AASS)
    ):
        if r2 > 1 and min(sizes) * spec.tokens_per_expert_per_sample < r2:
            continue
        plan = Plan(r1=len(sizes), r2=r2, order=order, micro_batch_samples=sizes)
        other_ms = makespan_ms(schedule_of(spec, plan))
        assert planned.makespan_ms <= other_ms * (1 + 1e-9)


def _token_spec(max_tokens: int) -> PlanSpec:
    """Return a spec with one token per sample, as for plan_batch."""
    return msgspec.convert(
        {
            "stages": {
                "attention": {"alpha_ms": 0.2, "beta_ms": 0.0},
                "shared": {"alpha_ms": 0.05, "beta_ms": 0.001},
                "expert": {"alpha_ms": 0.3, "beta_ms": 0.02},
                "a2e": {"alpha_ms": 0.05, "beta_ms": 0.01},
                "e2a": {"alpha_ms": 0.05, "beta_ms": 0.01},
            },
            "tokens_per_expert_per_sample": 0.25,
            "num_layers": 12,
            "max_samples": max_tokens,
            "max_r2": 16,
            "has_shared": True,
        },
        PlanSpec,
    )


def chunk_ms(start: int, stop: int) -> float:
    return 0.003 * (stop - start) + 1e-6 * (stop * stop - start * start)


SEQUENCES = st.lists(
    st.builds(
        lambda start, count: NewTokens(start, start + count),
        st.integers(0, 2000),
        st.one_of(st.just(1), st.integers(1, 1500)),
    ),
    min_size=1,
    max_size=12,
)


def _ragged_schedule(spec: PlanSpec, plan: Plan, sequences: list[NewTokens]) -> Schedule:
    """Return the plan's schedule rebuilt from its fields like an executor does."""
    ends = plan.sequence_chunks or (1.0,)
    first = 0
    micro_batches: list[MicroBatchTimes] = []
    for size in plan.micro_batch_samples:
        group = sequences[first : first + size]
        first += size
        for chunk in range(len(ends)):
            parts = []
            for start, stop in group:
                left, right = chunk_bounds(stop - start, ends)[chunk]
                parts.append((start + left, start + right))
            tokens = sum(stop - start for start, stop in parts)
            attention_ms = spec.stages.attention.alpha_ms + sum(
                chunk_ms(start, stop) for start, stop in parts
            )
            model = msgspec.structs.replace(
                spec,
                stages=msgspec.structs.replace(
                    spec.stages,
                    attention=msgspec.structs.replace(
                        spec.stages.attention, alpha_ms=attention_ms, beta_ms=0.0
                    ),
                ),
            )
            one = msgspec.structs.replace(
                plan, ma=tokens, r1=1, micro_batch_samples=(), sequence_chunks=(), shared_lag=0
            )
            micro_batches.extend(schedule_of(model, one).micro_batches)
    return Schedule(
        tuple(micro_batches), spec.num_layers, plan.order, plan.shared_lag, len(sequences)
    )


@given(SEQUENCES, st.booleans())
def test_replay_of_ragged_batch_equals_plan(sequences: list[NewTokens], beyond: bool) -> None:
    spec = _token_spec(100_000)
    planned = plan_batch(spec, sequences, chunk_ms, beyond=beyond)
    plan = planned.plan
    assert sum(plan.micro_batch_samples) == planned.samples == len(sequences)
    replayed = replay(_ragged_schedule(spec, plan, sequences))
    assert planned.makespan_ms == pytest.approx(replayed.makespan_ms, rel=1e-9)
    if not beyond:
        assert not plan.sequence_chunks
        assert not plan.shared_lag


@given(SEQUENCES)
def test_extended_plan_is_no_slower_than_paper_nor_paper_than_uncut(
    sequences: list[NewTokens],
) -> None:
    spec = _token_spec(100_000)
    paper_ms = plan_batch(spec, sequences, chunk_ms).makespan_ms
    assert plan_batch(spec, sequences, chunk_ms, beyond=True).makespan_ms <= paper_ms
    uncut = Plan(r1=1, micro_batch_samples=(len(sequences),))
    assert paper_ms <= makespan_ms(_ragged_schedule(spec, uncut, sequences)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "0 new tokens"),
        ([NewTokens(3, 3)], r"sequences\[0\]: tokens \[3, 3\)"),
        ([NewTokens(0, 1), NewTokens(-2, 3)], r"sequences\[1\]"),
        ([NewTokens(0, 60), NewTokens(0, 41)], "101 new tokens: give from 1 to max_samples=100"),
    ],
)
def test_empty_or_too_large_batch_is_rejected(sequences: list[NewTokens], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_batch(_token_spec(100), sequences, chunk_ms)


@given(st.integers(0, 50), st.sets(st.floats(0.01, 0.99), max_size=5))
def test_chunks_cover_a_sequence_once_in_order(tokens: int, cuts: set[float]) -> None:
    bounds = chunk_bounds(tokens, (*sorted(cuts), 1.0))
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(tokens))
