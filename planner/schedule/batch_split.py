"""Cuts a batch into micro-batches and a micro-batch into token groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from contracts.plan import Plan


def sequence_ranges(costs: Sequence[float], plan: Plan) -> list[tuple[int, int]]:
    """Half-open ranges of sequences that run together, in order; a plan with sequence chunks makes
    several micro-batches of each.

    With `plan.micro_batch_samples`, ranges of those sizes if they fit the batch; with `plan.ma`,
    ranges of ma samples (the last may be shorter). Otherwise as many as the plan has, so that the
    largest total cost is the least possible. Ranges are contiguous: a sequence that shares blocks
    with an earlier one of the same batch is never in an earlier micro-batch.
    """
    count, sizes = len(costs), plan.micro_batch_samples
    if sizes and sum(sizes) == count:
        return list(itertools.pairwise((0, *itertools.accumulate(sizes))))
    if plan.ma is not None and not sizes:
        return [(i, min(i + plan.ma, count)) for i in range(0, count, plan.ma)]
    return balanced_ranges(costs, min(plan.r1 // max(1, len(plan.sequence_chunks)), count))


def balanced_ranges(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """At most `parts` contiguous, non-empty ranges over `costs` with the least largest sum."""
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
    """At most r2 half-open token ranges whose sizes differ by at most one, none empty."""
    groups = min(r2, tokens)
    edges = [tokens * index // groups for index in range(groups + 1)] if groups else [0]
    return list(itertools.pairwise(edges))


def chunk_bounds(tokens: int, ends: Sequence[float]) -> list[tuple[int, int]]:
    """Half-open token ranges of a sequence cut at `ends` (ascending parts of 1, the last 1.0); some
    are empty where a sequence has fewer tokens than there are chunks."""
    edges = [0, *(round(tokens * end) for end in ends)]
    return list(itertools.pairwise(edges))
