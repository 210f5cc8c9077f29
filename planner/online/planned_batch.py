"""What a plan makes of a batch by stage models as they are at a moment."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.plan import Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.stages import PlanSpec
from planner.schedule.batch_plan import ChunkTime, NewTokens, plan_batch
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, schedule_of_pieces
from planner.schedule.solver import PlannedBatch

LEAST_GAIN = 0.1  # of the makespan: below, a batch is not cut. Models are not better than that, and
# they do not know what a message costs the cores that it wakes


def planned_batch(
    spec: PlanSpec, batch: Chunks, chunk_ms: ChunkTime, *, beyond: bool = False
) -> PlannedBatch:
    """The best plan, or none at all where cutting gains too little. Raises ValueError as
    `plan_batch`."""
    sequences = [NewTokens(start, stop) for start, stop in batch]
    planned = plan_batch(spec, sequences, chunk_ms, beyond=beyond)
    uncut_ms = replayed_ms(spec, chunk_ms, Plan(), [batch])
    if planned.makespan_ms > (1 - LEAST_GAIN) * uncut_ms:
        return PlannedBatch(Plan(me=spec.me(count_tokens(batch), 1)), uncut_ms, len(batch))
    return planned


def replayed_ms(
    spec: PlanSpec, chunk_ms: ChunkTime, plan: Plan, micro_batches: Sequence[Chunks]
) -> float:
    """The makespan of a plan on these micro-batches."""
    pieces = []
    for batch in micro_batches:
        tokens = count_tokens(batch)
        attention_ms = spec.stages.attention.alpha_ms + sum(chunk_ms(*c) for c in batch)
        pieces.append(Piece(attention_ms, spec.shared.at(tokens), tokens))
    return makespan_ms(schedule_of_pieces(spec, plan, pieces, 1))
