"""The plan of a batch under the present stage models."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.plan import Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.stages import PlanSpec
from planner.schedule.batch_plan import ChunkTime, NewTokens, plan_batch
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, schedule_of_pieces
from planner.schedule.solver import PlannedBatch

LEAST_GAIN = 0.1  # of the makespan; stage models are no more accurate than this


def planned_batch(
    spec: PlanSpec, batch: Chunks, chunk_ms: ChunkTime, *, beyond: bool = False
) -> PlannedBatch:
    """Return the best plan, or no cut if that gains little. Raises ValueError like `plan_batch`."""
    sequences = [NewTokens(start, stop) for start, stop in batch]
    planned = plan_batch(spec, sequences, chunk_ms, beyond=beyond)
    uncut_ms = replayed_ms(spec, chunk_ms, Plan(), [batch])
    if planned.makespan_ms > (1 - LEAST_GAIN) * uncut_ms:
        return PlannedBatch(Plan(me=spec.me(count_tokens(batch), 1)), uncut_ms, len(batch))
    return planned


def replayed_ms(
    spec: PlanSpec, chunk_ms: ChunkTime, plan: Plan, micro_batches: Sequence[Chunks]
) -> float:
    """Return the makespan of a plan on these micro-batches."""
    pieces = []
    for batch in micro_batches:
        tokens = count_tokens(batch)
        attention_ms = spec.stages.attention.alpha_ms + sum(chunk_ms(*c) for c in batch)
        pieces.append(Piece(attention_ms, spec.shared.at(tokens), tokens))
    return makespan_ms(schedule_of_pieces(spec, plan, pieces, 1))
