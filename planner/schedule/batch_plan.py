"""The plan of one batch of sequences of any lengths, prompts and single tokens mixed.

Batches of one bucket are similar enough to share a plan.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from contracts.config import ScheduleConfig
from contracts.plan import Order, Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.stages import PlanSpec
from planner.schedule.extended_plans import CHUNK_COUNTS, Cut, equal_ends, search
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, schedule_of_pieces
from planner.schedule.solver import PlannedBatch


def sequence_ranges(costs: Sequence[float], plan: Plan) -> list[tuple[int, int]]:
    """Return half-open ranges of sequences that run together.

    With `plan.micro_batch_samples`, ranges of those sizes if they fit the batch; with `plan.ma`,
    ranges of ma samples (the last may be shorter). Otherwise the plan's number of ranges with the
    least largest cost. Ranges are contiguous: a sequence that shares blocks with an earlier one is
    never in an earlier micro-batch. Sequence chunks make several micro-batches of each range.
    """
    count, sizes = len(costs), plan.micro_batch_samples
    if sizes and sum(sizes) == count:
        return list(itertools.pairwise((0, *itertools.accumulate(sizes))))
    if plan.ma is not None and not sizes:
        return [(i, min(i + plan.ma, count)) for i in range(0, count, plan.ma)]
    return balanced_ranges(costs, min(plan.r1 // max(1, len(plan.sequence_chunks)), count))


def balanced_ranges(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Return at most `parts` contiguous, non-empty ranges with the least largest sum."""
    if not costs:
        return []
    if parts <= 1:
        return [(0, len(costs))]
    low, high = max(costs), sum(costs)
    for _ in range(40):  # bisection on the largest sum; 2**-40 of the total is exact enough
        middle = (low + high) / 2
        if len(_greedy(costs, middle)) <= parts:
            high = middle
        else:
            low = middle
    return _greedy(costs, high)


def _greedy(costs: Sequence[float], limit: float) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0.0
    for index, cost in enumerate(costs):
        if index > start and total + cost > limit:
            ranges.append((start, index))
            start, total = index, 0.0
        total += cost
    ranges.append((start, len(costs)))
    return ranges


def token_group_bounds(tokens: int, r2: int) -> list[tuple[int, int]]:
    """Return at most r2 half-open token ranges, none empty, with sizes that differ by at most 1."""
    groups = min(r2, tokens)
    edges = [tokens * index // groups for index in range(groups + 1)] if groups else [0]
    return list(itertools.pairwise(edges))


def chunk_bounds(tokens: int, ends: Sequence[float]) -> list[tuple[int, int]]:
    """Return half-open token ranges of a sequence cut at `ends`.

    ends: ascending fractions, the last 1.0. Some ranges are empty in a very short sequence.
    """
    edges = [0, *(round(tokens * end) for end in ends)]
    return list(itertools.pairwise(edges))


def default_plan(schedule: ScheduleConfig, tokens: int) -> Plan:
    """Return the configured plan, with r1 and r2 lowered for small batches.

    No micro-batch or token group gets smaller than `min_split_tokens`: each has a fixed cost.
    """
    r1 = max(1, min(schedule.r1, tokens // schedule.min_split_tokens))
    r2 = max(1, min(schedule.r2, tokens // (r1 * schedule.min_split_tokens)))
    if schedule.order is Order.NAIVE:
        return Plan(order=Order.NAIVE)
    return Plan(r1=r1, r2=1 if schedule.order is Order.PPPIPE else r2, order=schedule.order)


STEPS_PER_OCTAVE = 4  # sizes in one bucket differ by less than 19 %; below 8 they are equal


class BatchBucket(NamedTuple):
    """Steps on a ladder of sizes; 0 for none.

    decode_rows, prompts: sequences with one new token, and with more. decode_context, prompt_pairs:
    their attention. prompt_tokens: new tokens. longest: of one prompt.
    """

    decode_rows: int
    decode_context: int
    prompts: int
    prompt_tokens: int
    prompt_pairs: int
    longest: int


def bucket_of(batch: Sequence[tuple[int, int]]) -> BatchBucket:
    """Return the bucket of a batch of new tokens [start, stop) per sequence."""
    contexts = [stop for start, stop in batch if stop - start == 1]
    prompts = [(start, stop) for start, stop in batch if stop - start > 1]
    lengths = [stop - start for start, stop in prompts]
    pairs = sum((stop - start) * (start + stop + 1) // 2 for start, stop in prompts)
    return BatchBucket(
        step(len(contexts)),
        step(sum(contexts)),
        step(len(prompts)),
        step(sum(lengths)),
        step(pairs),
        step(max(lengths, default=0)),
    )


def step(size: int) -> int:
    """Return the step of a size on the ladder."""
    return 0 if size <= 0 else 1 + math.floor(STEPS_PER_OCTAVE * math.log2(size))


MORE_TOKENS = 1.25  # limit of a batch's tokens over the planned ones
UNEVEN = 0.25  # limit of a micro-batch's relative deviation from its planned tokens


def fit_plan(plan: Plan, planned: Chunks, batch: Chunks, *, max_tokens: int) -> Plan | None:
    """Return `plan`, made for the batch `planned`, adapted to `batch`; None if it does not fit.

    The plan's micro-batch sizes remain if they cut this batch alike; otherwise the executor
    balances by attention.
    """
    tokens, planned_tokens = count_tokens(batch), count_tokens(planned)
    groups = plan.r1 // max(1, len(plan.sequence_chunks))
    if tokens > min(max_tokens, MORE_TOKENS * planned_tokens) or groups > len(batch):
        return None
    longest = max(stop - start for start, stop in batch)
    if longest < len(plan.sequence_chunks) or plan.r2 > tokens:
        return None
    if plan.micro_batch_samples and not _cut_alike(plan, planned, batch):
        return msgspec.structs.replace(plan, micro_batch_samples=(), ma=None)
    return plan


def _cut_alike(plan: Plan, planned: Chunks, batch: Chunks) -> bool:
    if len(planned) != len(batch):
        return False
    ranges = sequence_ranges([1.0] * len(batch), plan)
    pairs = [(count_tokens(planned[a:b]), count_tokens(batch[a:b])) for a, b in ranges]
    return all(abs(now - then) <= UNEVEN * then for then, now in pairs)


_R1 = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

LEAST_GAIN = 0.1  # of the makespan; stage models are no more accurate than this

ChunkTime = Callable[[int, int], float]


def plan_batch(
    spec: PlanSpec, sequences: Chunks, chunk_ms: ChunkTime, *, beyond: bool = False
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


def _check(spec: PlanSpec, sequences: Chunks) -> None:
    for index, (start, stop) in enumerate(sequences):
        if not 0 <= start < stop:
            raise ValueError(
                f"sequences[{index}]: tokens [{start}, {stop}): give at least one new token"
            )
    tokens = count_tokens(sequences)
    if not 1 <= tokens <= spec.max_samples:
        raise ValueError(
            f"sequences have {tokens} new tokens: give from 1 to max_samples={spec.max_samples}"
        )


def _cuts(
    spec: PlanSpec, sequences: Chunks, chunk_ms: ChunkTime, all_ends: Sequence[tuple[float, ...]]
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


def _ranges(sequences: Chunks, chunk_ms: ChunkTime) -> set[tuple[tuple[int, int], ...]]:
    attention_ms = [chunk_ms(*sequence) for sequence in sequences]
    tokens = [float(stop - start) for start, stop in sequences]
    return {
        tuple(balanced_ranges(costs, r1))
        for costs in (attention_ms, tokens)
        for r1 in _R1
        if r1 <= len(sequences)
    }


def _pieces(
    spec: PlanSpec, group: Chunks, chunk_ms: ChunkTime, ends: tuple[float, ...]
) -> list[Piece]:
    """Return the group's chunks in order; one piece without chunks."""
    bounds = [chunk_bounds(stop - start, ends) for start, stop in group]
    pieces = []
    for chunk in range(len(ends)):
        parts = [
            (start + cuts[chunk][0], start + cuts[chunk][1])
            for (start, _), cuts in zip(group, bounds, strict=True)
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
    planned = plan_batch(spec, batch, chunk_ms, beyond=beyond)
    uncut = uncut_batch(spec, batch, chunk_ms)
    return uncut if planned.makespan_ms > (1 - LEAST_GAIN) * uncut.makespan_ms else planned


def uncut_batch(spec: PlanSpec, batch: Chunks, chunk_ms: ChunkTime) -> PlannedBatch:
    """Return the plan of one micro-batch and one token group."""
    makespan = replayed_ms(spec, chunk_ms, Plan(), [batch])
    return PlannedBatch(Plan(me=spec.me(count_tokens(batch), 1)), makespan, len(batch))


def replayed_ms(
    spec: PlanSpec, chunk_ms: ChunkTime, plan: Plan, micro_batches: Sequence[Chunks]
) -> float:
    """Return the makespan of a plan on these micro-batches."""
    pieces = []
    for batch in micro_batches:
        tokens = count_tokens(batch)
        attention_ms = spec.stages.attention.alpha_ms + sum(chunk_ms(*c) for c in batch)
        pieces.append(Piece(attention_ms, spec.shared.at(tokens), tokens))
    return makespan_ms(schedule_of_pieces(spec, plan, pieces))
