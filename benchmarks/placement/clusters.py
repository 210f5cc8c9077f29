"""Two-stage balanced k-means, as Speculative MoE compares with: experts first, by the token ids
that they are wanted by; then token ids, by the experts that they want; then clusters are paired.

Shapes: E experts, V token ids that occur, R ranks, D dims.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import ID_LOAD, LayerRouting
from planner.placement.slots import Line, line_of

ROUNDS = 25


class Labelled(NamedTuple):
    """rank_of_id_V: of each token id up to the largest, the method's own."""

    line: Line
    rank_of_id_V: Ints


class Wants(NamedTuple):
    """ids_V: those that occur. times_VE: pairs."""

    ids_V: Ints
    times_VE: Floats

    def labels(self, label_V: Ints) -> Ints:
        """By id; an id that does not occur has rank 0."""
        ranks = np.zeros(int(self.ids_V.max()) + 1, np.int64)
        ranks[self.ids_V] = label_V
        return ranks


def wants(routing: LayerRouting) -> Wants:
    ids_V, at_N = np.unique(routing.counts.ids_N, return_inverse=True)
    E, V = routing.num_experts, len(ids_V)
    flat = totals(at_N * E + routing.counts.experts_N, routing.counts.times_N, V * E)
    return Wants(ids_V, flat.reshape(V, E))


def k_means(
    routing: LayerRouting, slots_per_rank: Sequence[int], seed: int, seconds: float
) -> Labelled:
    """The best of as many beginnings as the seconds allow, by its own measure."""
    rng, end = np.random.default_rng(seed), time.process_time() + seconds
    of = wants(routing)
    load_E, load_V = of.times_VE.sum(0), of.times_VE.sum(1)
    experts_ED = (of.times_VE / np.maximum(1.0, load_E)).T
    ids_VD = of.times_VE / load_V[:, None]
    rooms_R = np.array(slots_per_rank, float)
    bound_R = np.full(len(slots_per_rank), ID_LOAD * load_V.sum() / len(slots_per_rank))
    best: tuple[float, Ints, Ints] | None = None
    while best is None or time.process_time() < end:
        rank_E, spread_E = _clustered(experts_ED, np.ones(len(load_E)), rooms_R, rng)
        label_V, spread_V = _clustered(ids_VD, load_V, bound_R, rng)
        found = (spread_E + spread_V / load_V.sum(), rank_E, label_V)
        best = found if best is None or found[0] < best[0] else best
    _, rank_E, label_V = best
    label_V = _paired(of.times_VE, rank_E, label_V, len(slots_per_rank))
    line = line_of(np.arange(len(rank_E)), rank_E, slots_per_rank, ())
    return Labelled(line, of.labels(label_V))


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


def _paired(times_VE: Floats, rank_E: Ints, label_V: Ints, ranks: int) -> Ints:
    """Labels of ids renamed so that clusters of ids meet those of experts that they want most."""
    by_rank_VR = np.stack([times_VE[:, rank_E == rank].sum(1) for rank in range(ranks)], 1)
    seen_RR = np.stack([by_rank_VR[label_V == label].sum(0) for label in range(ranks)])
    name_R = np.zeros(ranks, np.int64)
    for _ in range(ranks):
        label, rank = divmod(int(seen_RR.argmax()), ranks)
        name_R[label] = rank
        seen_RR[label], seen_RR[:, rank] = -1.0, -1.0
    named: Ints = name_R[label_V]
    return named
