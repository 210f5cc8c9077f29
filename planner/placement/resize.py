"""The same experts on more or fewer ranks: as few as can be come to a rank that had them not.

    rank            0     |    1     |  2             rank            0    |   1   |  2
    slots        0 1 2 3  | 4 5 6 7  |       <──>     slots        0 1 2   | 4 5 6 | 3 7

Slots are dealt out evenly, those to spare too; who had more keeps one more. A rank gives what
another has as well before what it alone has, keeps the rest in order, and takes what nobody has any
more, then replicas of what is there least often. Where two ranks are alike the lower one goes
first: equal placements give equal ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec

from contracts.errors import ConfigError
from contracts.placement import Placement


def resize_placement(placement: Placement, ranks: int, *, generation: int) -> Placement:
    """`placement` on ranks 0 to ranks - 1. Raises ConfigError where there are not as many experts,
    or none."""
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
    """Of each rank of `after`, the experts of all layers that it did not have."""
    counts = [0] * after.ranks
    for old, new in zip(before.expert_of_slot, after.expert_of_slot, strict=True):
        had = _held(before, old, after.ranks)
        for rank, (low, high) in enumerate(after.slot_bounds):
            counts[rank] += len(set(new[low:high]) - set(had[rank]))
    return tuple(counts)


def _slots(placement: Placement, ranks: int) -> tuple[int, ...]:
    """A share of the experts each, and as many to spare as ranks have now, at most all experts."""
    experts, had = placement.num_experts, placement.slots_per_rank
    spare = -(-(sum(had) - experts) // placement.ranks)
    base, extra = divmod(experts, ranks)
    had_most = sorted(range(ranks), key=lambda rank: -had[rank] if rank < len(had) else 0)
    more = set(had_most[:extra])
    return tuple(min(experts, base + (rank in more) + spare) for rank in range(ranks))


def _held(placement: Placement, line: Sequence[int], ranks: int) -> list[list[int]]:
    """What each of so many ranks has of a layer; a rank that it does not name has nothing."""
    held = [list(line[low:high]) for low, high in placement.slot_bounds[:ranks]]
    return held + [[] for _ in range(ranks - len(held))]


def _line(num_experts: int, held: list[list[int]], slots: Sequence[int]) -> tuple[int, ...]:
    """A layer's slots. held: of each rank; it changes."""
    copies = Counter(itertools.chain.from_iterable(held))
    for rank, own in enumerate(held):
        while len(own) > slots[rank]:
            _give(own, copies)
    spare = sum(slots) - num_experts
    for own in held:  # what nobody has needs a slot
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
    """What is there most often; of equals the last."""
    given = max(enumerate(own), key=lambda each: (copies[each[1]], each[0]))[1]
    own.remove(given)
    copies[given] -= 1
