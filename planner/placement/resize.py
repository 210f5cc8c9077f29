"""Placement of the same experts on more or fewer ranks, with as few moves as possible.

    rank            0     |    1     |  2             rank            0    |   1   |  2
    slots        0 1 2 3  | 4 5 6 7  |       <──>     slots        0 1 2   | 4 5 6 | 3 7

Slots, spare ones included, are divided evenly; the ranks that had more keep one more. A rank gives
up experts that have replicas elsewhere first, keeps the others in order, and receives missing
experts, then replicas of the rarest. The lower rank wins ties, so that equal placements give equal
results.

Temporary placement of a lost rank's experts, which every rank computes alike, unaided:

    rank          0   |  1   |  2            lost: 1           rank       0      |  1  |   2
    slots        0 1  | 2 3  | 4 5                             slots    0 1 2    |     | 4 5 3

An expert with a replica on a remaining rank is served there; the others are dealt out in turn.
Experts keep their slots on remaining ranks, so that loaded weights are shared.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from contracts.errors import ConfigError
from contracts.placement import Placement


def resize_placement(placement: Placement, ranks: int, *, generation: int) -> Placement:
    """Return `placement` on ranks 0 to ranks - 1.

    Raises ConfigError unless 1 <= ranks <= the number of experts."""
    if not 1 <= ranks <= placement.num_experts:
        raise ConfigError(
            f"{ranks} expert ranks for {placement.num_experts} experts: give 1 to "
            f"{placement.num_experts}"
        )
    slots = _slots(placement, ranks)
    lines = [
        _line(placement.num_experts, _held(placement, line, ranks), slots) if line else ()
        for line in placement.expert_of_slot
    ]
    return msgspec.structs.replace(
        placement, generation=generation, slots_per_rank=slots, expert_of_slot=tuple(lines)
    )


def experts_received(before: Placement, after: Placement) -> tuple[int, ...]:
    """Return the experts, of all layers, that each rank of `after` has to load."""
    counts = [0] * after.ranks
    for old, new in zip(before.expert_of_slot, after.expert_of_slot, strict=True):
        had = _held(before, old, after.ranks)
        for rank, (low, high) in enumerate(after.slot_bounds):
            counts[rank] += len(set(new[low:high]) - set(had[rank]))
    return tuple(counts)


def _slots(placement: Placement, ranks: int) -> tuple[int, ...]:
    """Divide the experts evenly, with as many spare slots per rank as before."""
    experts, had = placement.num_experts, placement.slots_per_rank
    spare = -(-(sum(had) - experts) // placement.ranks)
    base, extra = divmod(experts, ranks)
    had_most = sorted(range(ranks), key=lambda rank: -had[rank] if rank < len(had) else 0)
    more = set(had_most[:extra])
    return tuple(min(experts, base + (rank in more) + spare) for rank in range(ranks))


def _held(placement: Placement, line: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the experts of each rank in a layer; new ranks have none."""
    held = [list(line[low:high]) for low, high in placement.slot_bounds[:ranks]]
    return held + [[] for _ in range(ranks - len(held))]


def _line(num_experts: int, held: list[list[int]], slots: Sequence[int]) -> tuple[int, ...]:
    """Return a layer's slots. held: experts of each rank, which changes."""
    copies = Counter(itertools.chain.from_iterable(held))
    for rank, own in enumerate(held):
        while len(own) > slots[rank]:
            _give(own, copies)
    spare = sum(slots) - num_experts
    for own in held:  # missing experts need a slot
        while copies.total() - len(+copies) > spare and any(copies[one] > 1 for one in own):
            _give(own, copies)
    missing = [expert for expert in range(num_experts) if not copies[expert]]
    for expert in missing:
        rank = max(range(len(held)), key=lambda each: slots[each] - len(held[each]))
        held[rank].append(expert)
        copies[expert] += 1
    for rank, own in enumerate(held):
        while len(own) < slots[rank]:
            others = (expert for expert in range(num_experts) if expert not in own)
            own.append(min(others, key=copies.__getitem__))
            copies[own[-1]] += 1
    return tuple(itertools.chain.from_iterable(held))


def _give(own: list[int], copies: Counter[int]) -> None:
    """Remove the expert with the most replicas, of equals the last."""
    given = max(enumerate(own), key=lambda each: (copies[each[1]], each[0]))[1]
    own.remove(given)
    copies[given] -= 1


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
