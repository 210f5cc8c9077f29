"""Temporary placement of a lost rank's experts. Every rank computes the same one, unaided.

    rank          0   |  1   |  2            lost: 1           rank       0      |  1  |   2
    slots        0 1  | 2 3  | 4 5                             slots    0 1 2    |     | 4 5 3

An expert with a replica on a remaining rank is served there; the others are dealt out in turn.
Experts keep their slots on remaining ranks, so that loaded weights are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from contracts.placement import Placement

MAX_FAILOVER_RANKS: Final = 32  # bits of a generation number
_MAX_GENERATION: Final = (1 << 30) - 1


def is_failover(generation: int) -> bool:
    """Return True if a generation number denotes a failover placement, not one of the planner's."""
    return generation >> MAX_FAILOVER_RANKS > 0


def failover_placement(placement: Placement, lost: Collection[int]) -> Placement | None:
    """Return `placement` without the ranks `lost`, or None if no rank is left or no number fits.

    The remaining ranks take over the experts. The generation number encodes the source and the lost
    ranks."""
    left = [rank for rank in range(placement.ranks) if rank not in lost]
    if not left or placement.ranks > MAX_FAILOVER_RANKS or placement.generation > _MAX_GENERATION:
        return None
    lines = placement.expert_of_slot
    layers = [[line[low:high] for low, high in placement.slot_bounds] for line in lines]
    missing = [
        _missing(placement.num_experts, [ranks[n] for n in left]) if line else []
        for line, ranks in zip(lines, layers, strict=True)
    ]
    most = max(map(len, missing), default=0)
    slots = [0] * placement.ranks
    for turn, rank in enumerate(left):
        slots[rank] = placement.slots_per_rank[rank] + len(range(turn, most, len(left)))
    return msgspec.structs.replace(
        placement,
        generation=(placement.generation + 1 << MAX_FAILOVER_RANKS)
        + sum(1 << rank for rank in set(lost)),
        slots_per_rank=tuple(slots),
        expert_of_slot=tuple(
            _deal_layer(placement.num_experts, ranks, missing_experts, left, slots) if line else ()
            for line, ranks, missing_experts in zip(lines, layers, missing, strict=True)
        ),
    )


def _missing(num_experts: int, left: Sequence[Sequence[int]]) -> list[int]:
    present = {expert for experts in left for expert in experts}
    return [expert for expert in range(num_experts) if expert not in present]


def _deal_layer(
    num_experts: int,
    ranks: Sequence[Sequence[int]],
    missing: Sequence[int],
    left: Sequence[int],
    slots: Sequence[int],
) -> tuple[int, ...]:
    """Return a layer's slots; replicas fill the spare ones."""
    line: list[int] = []
    for turn, rank in enumerate(left):
        own = [*ranks[rank], *missing[turn :: len(left)]]
        others = (expert for expert in range(num_experts) if expert not in own)
        line += [*own, *(next(others) for _ in range(slots[rank] - len(own)))]
    return tuple(line)
