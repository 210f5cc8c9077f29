"""Two-stage balanced k-means, as Speculative MoE compares with: experts first, by the token ids
that they are wanted by; then token ids, by the experts that they want; then clusters are paired.

Shapes: E experts, V token ids that occur, R ranks, D dims.
"""

import time
from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import ID_LOAD, LayerRouting
from planner.placement.slots import Line, line_of

ROUNDS = 25


def wants(routing: LayerRouting) -> Floats:
    """[V, E] pairs of each token id that occurs."""
    ids_V, at_N = np.unique(routing.counts.ids_N, return_inverse=True)
    E, V = routing.num_experts, len(ids_V)
    flat = totals(at_N * E + routing.counts.experts_N, routing.counts.times_N, V * E)
    return flat.reshape(V, E)


def k_means(
    routing: LayerRouting, slots_per_rank: Sequence[int], seed: int, seconds: float
) -> Line:
    """The best of as many beginnings as the seconds allow, by its own measure."""
    rng, end = np.random.default_rng(seed), time.process_time() + seconds
    times_VE = wants(routing)
    load_E, load_V = times_VE.sum(0), times_VE.sum(1)
    experts_ED = (times_VE / np.maximum(1.0, load_E)).T
    ids_VD = times_VE / load_V[:, None]
    rooms_R = np.array(slots_per_rank, float)
    bound_R = np.full(len(slots_per_rank), ID_LOAD * load_V.sum() / len(slots_per_rank))
    best: tuple[float, Ints] | None = None
    while best is None or time.process_time() < end:
        rank_E, spread_E = _clustered(experts_ED, np.ones(len(load_E)), rooms_R, rng)
        _, spread_V = _clustered(ids_VD, load_V, bound_R, rng)
        found = (spread_E + spread_V / load_V.sum(), rank_E)
        best = found if best is None or found[0] < best[0] else best
    return line_of(np.arange(len(load_E)), best[1], slots_per_rank, ())


def _clustered(
    points_ND: Floats, weights_N: Floats, rooms_R: Floats, rng: np.random.Generator
) -> tuple[Ints, float]:
    """Labels within the rooms, and the weighted sum of squared distances."""
    R = len(rooms_R)
    centres_RD = points_ND[rng.choice(len(points_ND), R, replace=False)]
    label_N = np.zeros(len(points_ND), np.int64)
    spread = float("inf")
    for _ in range(ROUNDS):
        gaps_NR = ((points_ND**2).sum(1)[:, None] - 2 * points_ND @ centres_RD.T) + (
            centres_RD**2
        ).sum(1)
        found_N = assigned(-gaps_NR, weights_N, rooms_R)
        spread = float(weights_N @ gaps_NR[np.arange(len(found_N)), found_N])
        if (found_N == label_N).all():
            break
        label_N = found_N
        for rank in range(R):
            members = label_N == rank
            if members.any():
                centres_RD[rank] = np.average(
                    points_ND[members], axis=0, weights=weights_N[members]
                )
    return label_N, spread


def assigned(score_NR: Floats, weights_N: Floats, rooms_R: Floats) -> Ints:
    """The best label of each, as long as there is room: who would lose most chooses first."""
    two_N2 = np.sort(score_NR, axis=1)[:, -2:]
    left_R, label_N = rooms_R + 1e-9, np.zeros(len(score_NR), np.int64)
    for n in np.argsort(two_N2[:, 0] - two_N2[:, -1], kind="stable").tolist():
        fits_R = left_R >= weights_N[n]
        fits_R = fits_R if fits_R.any() else left_R == left_R.max()
        label_N[n] = np.where(fits_R, score_NR[n], -np.inf).argmax()
        left_R[label_N[n]] -= weights_N[n]
    return label_N
