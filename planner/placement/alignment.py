"""Alignment of the layers of a placement: token ids find their experts on one rank in all layers.

Each layer is solved by itself, so its groups of experts are numbered at random. Exchanging the
groups of two ranks with equal slots changes neither copies nor load. It raises the share of a
request's pairs on its best rank, which request routing uses (planner/routing/local_shares.py).

Objective: squared norm of the sum over layers of each id's pairs per rank beyond the mean share.

Shapes: V token ids, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from contracts.placement import bounds_of
from planner.arrays import Floats, Ints
from planner.placement.routing import TokenCounts, shares
from planner.placement.slots import Line, held

MAX_ROUNDS = 20  # over all layers; two or three are usual


def aligned(
    lines: Sequence[Line],
    counts: Sequence[TokenCounts],
    slots_per_rank: Sequence[int],
    experts: int,
    nodes: Sequence[int] | None = None,
) -> list[Line]:
    """Return the lines of all layers with the ranks of equal slots exchanged.

    nodes: of the ranks, if only ranks of one node may be exchanged."""
    kinds = list(zip(slots_per_rank, nodes or [0] * len(slots_per_rank), strict=True))
    ids = max(int(each.ids_N.max(initial=-1)) + 1 for each in counts)
    tables = [
        _deviations(shares(*each, held(line, slots_per_rank, experts)), ids)
        for line, each in zip(lines, counts, strict=True)
    ]
    total_VR = np.zeros_like(tables[0])
    source = [np.arange(len(slots_per_rank)) for _ in lines]  # of each rank's group
    for turn in range(MAX_ROUNDS):
        changed = False
        for layer, table_VR in enumerate(tables):
            if turn:
                total_VR -= table_VR[:, source[layer]]
            better_R = _assignment(total_VR.T @ table_VR, source[layer], kinds)
            changed |= bool((better_R != source[layer]).any())
            source[layer] = better_R
            total_VR += table_VR[:, better_R]
        if not changed:
            break
    return [regrouped(line, each, slots_per_rank) for line, each in zip(lines, source, strict=True)]


def _deviations(shares_VR1: Floats, ids: int) -> Floats:
    """Return pairs beyond the mean share, by the root of an id's pairs; zeros without any."""
    times_V1, all_R1 = shares_VR1[:, -1:], shares_VR1.sum(0)
    mean_R = all_R1[:-1] / max(1.0, all_R1[-1])
    found_VR = (shares_VR1[:, :-1] - times_V1 * mean_R) / np.sqrt(np.maximum(times_V1, 1.0))
    return np.pad(found_VR, ((0, ids - len(found_VR)), (0, 0)))


def _assignment(gain_RR: Floats, start_R: Ints, kinds: Sequence[tuple[int, int]]) -> Ints:
    """Return the group of each rank by exchanges that raise the sum of gain[rank, group].

    kinds: only groups of ranks of one kind are exchanged."""
    source_R, is_better = start_R.copy(), True
    pairs = [
        [one, other]
        for one, other in itertools.combinations(range(len(start_R)), 2)
        if kinds[one] == kinds[other]
    ]
    while is_better:
        is_better = False
        for both in pairs:
            now, after = gain_RR[both, source_R[both]], gain_RR[both, source_R[both[::-1]]]
            if after.sum() > now.sum() * (1 + 1e-9) + 1e-9:
                source_R[both] = source_R[both[::-1]]
                is_better = True
    return source_R


def regrouped(line: Line, source_R: Ints, slots_per_rank: Sequence[int]) -> Line:
    """Return a line with the group `source_R[r]` on each rank r."""
    groups = [line[low:high] for low, high in bounds_of(slots_per_rank)]
    return tuple(itertools.chain.from_iterable(groups[group] for group in source_R))
