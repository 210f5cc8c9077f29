"""Random planning problems for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from contracts.plan import Order, Plan
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.schedule.schedule import Schedule, schedule_of

_ALPHAS_MS = st.one_of(st.just(0.0), st.floats(0.001, 5.0))
_BETAS_MS = st.one_of(st.floats(0.001, 0.1), st.floats(0.1, 5.0))


@st.composite
def specs(draw: st.DrawFn, *, max_samples: int = 8, max_r2: int = 8) -> PlanSpec:
    """Specs of at most `max_samples` samples, with the fields of plans beyond the paper."""
    tokens = draw(st.sampled_from([1.0, 3.5, 1000.0]))
    # Betas per sample, so that no stage is always the slowest.
    per_x = {"attention": 1.0, "shared": 1.0, "expert": tokens, "a2e": tokens, "e2a": tokens}
    stages = {name: Linear(draw(_ALPHAS_MS), draw(_BETAS_MS) / x) for name, x in per_x.items()}
    return PlanSpec(
        stages=StageModels(**stages),
        tokens_per_expert_per_sample=tokens,
        num_layers=draw(st.integers(1, 9)),
        max_samples=draw(st.integers(1, max_samples)),
        max_r2=draw(st.integers(1, max_r2)),
        has_shared=draw(st.booleans()),
        attention_quadratic_fraction=draw(st.floats(0.0, 1.0)),
        attention_chunk_ms=draw(_ALPHAS_MS),
        attention_context_ms=draw(_ALPHAS_MS),
    )


def plans(order: Order) -> st.SearchStrategy[Plan]:
    """Plans of the paper with this order and a few micro-batches and token groups."""
    most_r1 = 1 if order is Order.NAIVE else 5
    most_r2 = 1 if order.shared_before_dispatch else 6
    return st.builds(
        Plan,
        order=st.just(order),
        ma=st.integers(1, 3),
        r1=st.integers(1, most_r1),
        r2=st.integers(1, most_r2),
    )


@st.composite
def beyond_plans(draw: st.DrawFn, spec: PlanSpec) -> Plan:
    """Plans with any mixture of fields beyond the paper that `spec` supports."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    cuts = draw(st.sets(st.sampled_from([0.25, 0.5, 0.6, 0.75]), max_size=2))
    chunks = (*sorted(cuts), 1.0) if cuts else ()
    r1 = len(sizes) * max(1, len(chunks))
    return Plan(
        order=Order.ASAS,
        r1=r1,
        r2=draw(st.integers(1, 5)),
        shared_lag=draw(st.integers(0, r1 - 1)),
        micro_batch_samples=tuple(sizes),
        sequence_chunks=chunks,
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules of any order, within and beyond the paper."""
    spec = draw(specs())
    order = draw(st.sampled_from([*Order, None]))
    plan = draw(beyond_plans(spec) if order is None else plans(order))
    return schedule_of(spec, plan)
