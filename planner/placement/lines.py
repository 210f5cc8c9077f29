"""A layer's experts as one line of slots, rank after rank.

Shapes: E experts, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from contracts.errors import ConfigError
from contracts.placement import bounds_of
from planner.placement.slots import LayerSlots
from planner.placement.sums import Bools, Ints

Line = tuple[int, ...]


def ranks_of(slots_per_rank: Sequence[int]) -> Ints:
    """The rank of each slot."""
    return np.repeat(np.arange(len(slots_per_rank)), slots_per_rank)


def layer_slots(line: Line, slots_per_rank: Sequence[int]) -> LayerSlots:
    return LayerSlots(line, bounds_of(slots_per_rank))


def held(line: Line, slots_per_rank: Sequence[int], num_experts: int) -> Bools:
    """[E, R] whether the rank has the expert."""
    return layer_slots(line, slots_per_rank).held(num_experts)


def moved(before: Line, after: Line, slots_per_rank: Sequence[int]) -> tuple[int, ...]:
    """Of each rank, the experts that it did not have."""
    pairs = bounds_of(slots_per_rank)
    return tuple(len(set(after[low:high]) - set(before[low:high])) for low, high in pairs)


def check_slots(num_experts: int, slots_per_rank: Sequence[int]) -> None:
    """Raises ConfigError where not every expert has a slot, or a rank has more slots than there are
    experts."""
    slots, most = sum(slots_per_rank), max(slots_per_rank, default=0)
    if min(slots_per_rank, default=-1) < 0 or slots < num_experts or most > num_experts:
        raise ConfigError(
            f"slots_per_rank={tuple(slots_per_rank)}: {num_experts} experts need as many slots or "
            f"more in all, and a rank has a use for {num_experts} at most"
        )


def first_homes(num_experts: int, slots_per_rank: Sequence[int]) -> Ints:
    """[R] how many experts have their first slot there: alike, as far as there are slots."""
    homes_R, room_R = np.zeros(len(slots_per_rank), np.int64), np.asarray(slots_per_rank)
    while (left := num_experts - int(homes_R.sum())) > 0:
        open_R = np.flatnonzero(homes_R < room_R)
        level_R = open_R[homes_R[open_R] == homes_R[open_R].min()]
        homes_R[level_R[:left]] += 1
    return homes_R


def contiguous_line(load_E: Ints, slots_per_rank: Sequence[int]) -> Line:
    """Experts in order; in a rank's spare slots, after them, the hottest that it has not, where
    each replica halves, thirds, … what an expert counts."""
    homes_R = first_homes(len(load_E), slots_per_rank)
    ranks_E = np.repeat(np.arange(len(homes_R)), homes_R)
    lines = [np.flatnonzero(ranks_E == rank).tolist() for rank in range(len(homes_R))]
    replicas_E = np.ones(len(load_E))
    for _ in range(max(slots_per_rank)):
        for line, slots in zip(lines, slots_per_rank, strict=True):
            if len(line) < slots:
                heat_E = load_E / replicas_E
                heat_E[line] = -1.0
                line.append(int(heat_E.argmax()))
                replicas_E[line[-1]] += 1
    return tuple(itertools.chain.from_iterable(lines))


def line_of(experts_S: Ints, ranks_S: Ints, slots_per_rank: Sequence[int], start: Line) -> Line:
    """Experts of each rank in ascending order; with a `start`, who stays on a rank stays in its
    slot, and who comes takes the slot of one who left."""
    line: list[int] = []
    for rank, (low, high) in enumerate(bounds_of(slots_per_rank)):
        mine = sorted(experts_S[ranks_S == rank].tolist())
        before = start[low:high]
        comes = iter(sorted(set(mine) - set(before)))
        line += [e if e in mine else next(comes) for e in before] if start else mine
    return tuple(line)
