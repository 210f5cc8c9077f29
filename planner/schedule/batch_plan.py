"""The plan of one batch of sequences of any lengths, prompts and single tokens mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from contracts.plan import Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.stages import PlanSpec
from planner.schedule.extended_plans import CHUNK_COUNTS, Cut, equal_ends, search
from planner.schedule.plan_fit import balanced_ranges, chunk_bounds
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, schedule_of_pieces
from planner.schedule.solver import PlannedBatch

_R1 = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

LEAST_GAIN = 0.1  # of the makespan; stage models are no more accurate than this

ChunkTime = Callable[[int, int], float]


class NewTokens(NamedTuple):
    """New tokens [start, stop) of a sequence; those before are cached."""

    start: int
    stop: int


def plan_batch(
    spec: PlanSpec, sequences: Sequence[NewTokens], chunk_ms: ChunkTime, *, beyond: bool = False
) -> PlannedBatch:
    """Return the plan that finishes `sequences` soonest; its `samples` counts sequences.

    spec: a sample is one token here: `max_samples` tokens, `tokens_per_expert_per_sample` ag*K/E,
    shared expert per token; of attention only `alpha_ms` counts. chunk_ms(start, stop): further
    attention time in ms for new tokens [start, stop).

    Micro-batches are contiguous ranges of sequences, balanced by attention or by tokens. `beyond`
    adds the plans of planner/schedule/extended_plans.py. Raises ValueError for a batch that is
    empty or does not fit.
    """
    _check(spec, sequences)
    cuts = list(_cuts(spec, sequences, chunk_ms, ((1.0,),)))
    if beyond:
        ends = [equal_ends(chunks) for chunks in CHUNK_COUNTS]
        cuts.extend(_cuts(spec, sequences, chunk_ms, ends))
    return search(spec, cuts, late_shared=beyond)


def _check(spec: PlanSpec, sequences: Sequence[NewTokens]) -> None:
    for index, sequence in enumerate(sequences):
        if not 0 <= sequence.start < sequence.stop:
            raise ValueError(
                f"sequences[{index}]: tokens [{sequence.start}, {sequence.stop}): "
                "give at least one new token"
            )
    tokens = sum(sequence.stop - sequence.start for sequence in sequences)
    if not 1 <= tokens <= spec.max_samples:
        raise ValueError(
            f"sequences have {tokens} new tokens: give from 1 to max_samples={spec.max_samples}"
        )


def _cuts(
    spec: PlanSpec,
    sequences: Sequence[NewTokens],
    chunk_ms: ChunkTime,
    all_ends: Sequence[tuple[float, ...]],
) -> Iterator[Cut]:
    for ranges in _ranges(sequences, chunk_ms):
        sizes = tuple(last - first for first, last in ranges)
        for ends in all_ends:
            if len(ranges) * len(ends) > _R1[-1]:
                continue
            pieces = [
                piece
                for first, last in ranges
                for piece in _pieces(spec, sequences[first:last], chunk_ms, ends)
            ]
            if min(piece.amount for piece in pieces) > 0:
                chunks = ends if len(ends) > 1 else ()
                plan = Plan(r1=len(pieces), micro_batch_samples=sizes, sequence_chunks=chunks)
                yield Cut(plan, pieces, len(sequences))


def _ranges(
    sequences: Sequence[NewTokens], chunk_ms: ChunkTime
) -> set[tuple[tuple[int, int], ...]]:
    attention_ms = [chunk_ms(*sequence) for sequence in sequences]
    tokens = [float(stop - start) for start, stop in sequences]
    return {
        tuple(balanced_ranges(costs, r1))
        for costs in (attention_ms, tokens)
        for r1 in _R1
        if r1 <= len(sequences)
    }


def _pieces(
    spec: PlanSpec, group: Sequence[NewTokens], chunk_ms: ChunkTime, ends: tuple[float, ...]
) -> list[Piece]:
    """Return the group's chunks in order; one piece without chunks."""
    bounds = [chunk_bounds(stop - start, ends) for start, stop in group]
    pieces = []
    for chunk in range(len(ends)):
        parts = [
            (sequence.start + cuts[chunk][0], sequence.start + cuts[chunk][1])
            for sequence, cuts in zip(group, bounds, strict=True)
        ]
        tokens = count_tokens(parts)
        attention_ms = sum(chunk_ms(start, stop) for start, stop in parts if stop > start)
        launch_ms = spec.stages.attention.alpha_ms
        pieces.append(Piece(launch_ms + attention_ms, spec.shared.at(tokens), tokens))
    return pieces


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
