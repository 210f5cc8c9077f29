"""The paper's cross-entropy method (Speculative MoE, Algorithm 1), as printed: labels of token ids
and experts drawn from multinomials, which are refitted to the fifth that is most local.

Shapes: E experts, V token ids that occur, R ranks.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.placement.clusters import wants
from planner.arrays import Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import LayerRouting
from planner.placement.slots import Line, line_of

SAMPLES = 64  # of an iteration
ELITE = 0.2
RELAXED = 1.1  # tokens of a cluster over the mean, at most


def cross_entropy(
    routing: LayerRouting, slots_per_rank: Sequence[int], seed: int, seconds: float
) -> Line:
    """As many iterations as the seconds allow."""
    rng, end = np.random.default_rng(seed), time.process_time() + seconds
    times_VE, R = wants(routing), len(slots_per_rank)
    V, E = times_VE.shape
    chance_VR, chance_ER = np.full((V, R), 1 / R), np.full((E, R), 1 / R)
    load_V = times_VE.sum(1)
    while time.process_time() < end:
        drawn = []
        for _ in range(SAMPLES):
            rank_E = _equal(_drawn(chance_ER, rng), chance_ER, slots_per_rank, rng)
            label_V = _relaxed(_drawn(chance_VR, rng), load_V, R, rng)
            drawn.append((_local(times_VE, label_V, rank_E), label_V, rank_E))
        drawn.sort(key=lambda each: -each[0])
        elite = drawn[: int(ELITE * SAMPLES)]
        chance_VR = np.mean([np.eye(R)[label_V] for _, label_V, _ in elite], axis=0)
        chance_ER = np.mean([np.eye(R)[rank_E] for _, _, rank_E in elite], axis=0)
    rank_E = _equal(chance_ER.argmax(1), chance_ER, slots_per_rank, rng)
    return line_of(np.arange(E), rank_E, slots_per_rank, ())


def _drawn(chance_NR: Floats, rng: np.random.Generator) -> Ints:
    until_NR = chance_NR.cumsum(1)
    picked: Ints = (rng.random(len(chance_NR))[:, None] > until_NR[:, :-1]).sum(1)
    return picked


def _equal(
    rank_E: Ints, chance_ER: Floats, slots_per_rank: Sequence[int], rng: np.random.Generator
) -> Ints:
    """With as many experts on each rank as it has slots: any of those too many leave, for whichever
    rank with room is the likeliest."""
    rank_E = rank_E.copy()
    room_R = np.array(slots_per_rank) - np.bincount(rank_E, minlength=len(slots_per_rank))
    for expert in rng.permutation(len(rank_E)).tolist():
        if room_R[rank_E[expert]] < 0:
            room_R[rank_E[expert]] += 1
            rank_E[expert] = np.where(room_R > 0, chance_ER[expert], -1.0).argmax()
            room_R[rank_E[expert]] -= 1
    return rank_E


def _relaxed(label_V: Ints, load_V: Floats, ranks: int, rng: np.random.Generator) -> Ints:
    """Any ids leave clusters that have over 1.1 of the mean, for the emptiest one."""
    bound = RELAXED * load_V.sum() / ranks
    label_V, load_R = label_V.copy(), totals(label_V, load_V, ranks)
    for label in np.flatnonzero(load_R > bound):
        ids = rng.permutation(np.flatnonzero(label_V == label))
        leave = ids[: int(np.searchsorted(load_V[ids].cumsum(), load_R[label] - bound)) + 1]
        to = int(load_R.argmin())
        label_V[leave] = to
        load_R[label] -= load_V[leave].sum()
        load_R[to] += load_V[leave].sum()
    return label_V


def _local(times_VE: Floats, label_V: Ints, rank_E: Ints) -> float:
    return float(times_VE[label_V[:, None] == rank_E[None, :]].sum() / times_VE.sum())
