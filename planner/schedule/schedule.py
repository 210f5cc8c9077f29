"""A plan with the times of its tasks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from contracts.plan import Order, Plan
from planner.costs.stages import PlanSpec


class GroupRun(NamedTuple):
    """Consecutive equal token groups; times of one of them in ms."""

    repeats: int
    a2e_ms: float
    expert_ms: float
    e2a_ms: float


class MicroBatchTimes(NamedTuple):
    """One layer's task times of a micro-batch in ms; token groups in the order of sending."""

    attention_ms: float
    shared_ms: float  # 0: no such task
    groups: tuple[GroupRun, ...]


class Schedule(NamedTuple):
    """Tasks of every layer and their order on the attention group."""

    micro_batches: tuple[MicroBatchTimes, ...]
    num_layers: int
    order: Order
    shared_lag: int


class Piece(NamedTuple):
    """A micro-batch: attention and shared time in ms; amount: its tokens in samples of the spec."""

    attention_ms: float
    shared_ms: float
    amount: float


def schedule_of(spec: PlanSpec, plan: Plan) -> Schedule:
    """Return the schedule of `plan`. Raises ValueError if the spec lacks what the plan needs.

    Without `plan.micro_batch_samples`, micro-batches have `plan.ma` samples each.
    """
    sizes = plan.micro_batch_samples
    if not sizes:
        if plan.ma is None:
            raise ValueError("ma is missing: a plan without micro_batch_samples needs it")
        sizes = (plan.ma,) * (plan.r1 // max(1, len(plan.sequence_chunks)))
    return schedule_of_pieces(spec, plan, pieces_of(spec, plan, sizes))


def schedule_of_pieces(spec: PlanSpec, plan: Plan, pieces: Sequence[Piece]) -> Schedule:
    """Return the schedule of `plan` with the given micro-batches."""
    return Schedule(
        tuple(
            MicroBatchTimes(
                piece.attention_ms, piece.shared_ms, (token_groups(spec, piece.amount, plan.r2),)
            )
            for piece in pieces
        ),
        spec.num_layers,
        plan.order,
        plan.shared_lag,
    )


def pieces_of(spec: PlanSpec, plan: Plan, sizes: Sequence[int]) -> list[Piece]:
    """Return micro-batches of `sizes` samples, each cut into the plan's chunks."""
    return [piece for size in sizes for piece in _chunks(spec, plan, size)]


def _chunks(spec: PlanSpec, plan: Plan, size: int) -> list[Piece]:
    """Return the chunks of `size` samples.

    A chunk [u, v) of the length has v - u of the tokens and, causally, v^2 - u^2 of the pairs; a
    later chunk reads keys and values up to v back.
    """
    attention, shared = spec.stages.attention, spec.shared
    if not plan.sequence_chunks:
        return [Piece(attention.at(size), shared.at(size), size)]
    quadratic = spec.attention_quadratic_fraction
    if quadratic is None:
        raise ValueError("attention_quadratic_fraction is missing: sequence_chunks need it")
    pieces = []
    for u, v in itertools.pairwise((0.0, *plan.sequence_chunks)):
        attention_ms = attention.at(
            size * ((1 - quadratic) * (v - u) + quadratic * (v * v - u * u))
        )
        if u > 0:
            attention_ms += size * (spec.attention_chunk_ms + spec.attention_context_ms * v)
        pieces.append(Piece(attention_ms, shared.at(size * (v - u)), size * (v - u)))
    return pieces


def token_groups(spec: PlanSpec, amount: float, r2: int) -> GroupRun:
    """Return r2 equal token groups of `amount` samples, each with `me` tokens per expert."""
    stages, me = spec.stages, spec.me(amount, r2)
    return GroupRun(r2, stages.a2e.at(me), stages.expert.at(me), stages.e2a.at(me))
