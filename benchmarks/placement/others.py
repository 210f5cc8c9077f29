"""EPLB, and balance alone. Shapes: E experts, R ranks, S slots."""

import itertools
from collections.abc import Sequence

import numpy as np

from planner.placement.routing import LayerRouting
from planner.placement.search import balanced
from planner.placement.slots import Line, first_homes, line_of


def load_alone(routing: LayerRouting, slots_per_rank: Sequence[int]) -> Line:
    """The hottest expert first, each to the least loaded rank that has room."""
    homes_R = first_homes(routing.num_experts, slots_per_rank)
    ranks_E = balanced(routing.load().astype(float), homes_R)
    return line_of(np.arange(len(ranks_E)), ranks_E, slots_per_rank, ())


def eplb(routing: LayerRouting, slots_per_rank: Sequence[int]) -> Line:
    """DeepSeek's EPLB without node groups: spare slots go to the experts with most pairs a replica,
    one after the other; then replicas are packed, the heaviest first, each to the least loaded rank
    with room that has none of that expert (which EPLB itself does not ask for)."""
    load_E, spare = routing.load().astype(float), sum(slots_per_rank) - routing.num_experts
    replicas_E = np.ones(routing.num_experts)
    for _ in range(spare):
        open_E = replicas_E < len(slots_per_rank)
        replicas_E[np.where(open_E, load_E / replicas_E, -1.0).argmax()] += 1
    items = np.repeat(np.arange(len(load_E)), replicas_E.astype(int))
    weights = (load_E / replicas_E)[items]
    lines: list[list[int]] = [[] for _ in slots_per_rank]
    load_R = np.zeros(len(lines))
    for n in np.argsort(-weights, kind="stable").tolist():
        expert = int(items[n])
        room = [len(line) < s for line, s in zip(lines, slots_per_rank, strict=True)]
        free = [r for r, line in enumerate(lines) if room[r] and expert not in line]
        if not free:
            free = [_made_room(lines, expert, room.index(True))]
        rank = min(free, key=lambda r: load_R[r])
        lines[rank].append(expert)
        load_R[rank] += weights[n]
    return tuple(itertools.chain.from_iterable(map(sorted, lines)))


def _made_room(lines: list[list[int]], expert: int, full: int) -> int:
    """A rank without that expert, which gave one of its own to rank `full`, which has it."""
    for rank, line in enumerate(lines):
        for other in line if expert not in line else ():
            if other not in lines[full]:
                line.remove(other)
                lines[full].append(other)
                return rank
    raise ValueError(f"no rank is without expert {expert}")
