"""The plan of a batch without a planner, and the fit of a plan to a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from contracts.config import ScheduleConfig
from contracts.plan import Order, Plan
from planner.costs.model_shape import Chunks, count_tokens


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
