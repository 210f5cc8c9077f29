"""Routing shape of a placement on a sample of routing.

Copies and the busiest rank's shares are means over batches of the sample: the slowest rank of a
batch delays all.
"""

from collections.abc import Sequence

import numpy as np

from planner.arrays import Array, Bools
from planner.costs.routing_shape import RankShare, RoutingShape, Spread
from planner.placement.routing import BATCH_TOKENS, LayerRouting, batches_of_ranks
from planner.placement.slots import LayerSlots


def routing_shape(layers: Sequence[tuple[LayerRouting, LayerSlots]]) -> RoutingShape:
    """Return the shape of all layers with experts, ascending."""
    return RoutingShape(tuple(spread_of(routing, placed) for routing, placed in layers))


def spread_of(routing: LayerRouting, placed: LayerSlots) -> Spread:
    """Return the spread of one layer. Raises ValueError for a sample without tokens."""
    if not len(routing.sets_PK):
        raise ValueError("a routing sample without tokens: give at least one token")
    ranks, experts = len(placed.bounds), routing.num_experts
    copies, shares = 0, []
    for ranks_TK in batches_of_ranks(routing, placed):
        tokens, top_k = ranks_TK.shape
        hits_TR = np.zeros((tokens, ranks), bool)
        hits_TR[np.arange(tokens)[:, None], ranks_TK] = True
        copies += int(hits_TR.sum())
        pairs = np.bincount(ranks_TK.ravel(), minlength=ranks).max() / (tokens * top_k) * experts
        shares.append((tokens, hits_TR.sum(0).max() / tokens, pairs))
    tokens_B, rows_B, pairs_B = np.array(shares).T
    busiest = RankShare(
        float(np.average(rows_B, weights=tokens_B)), float(np.average(pairs_B, weights=tokens_B))
    )
    mean = RankShare(copies / len(routing.sets_PK) / ranks, experts / ranks)
    slots = max(high - low for low, high in placed.bounds)
    return Spread(ranks, slots, mean, busiest, _at_home(routing, placed, mean.rows * ranks))


def _at_home(routing: LayerRouting, placed: LayerSlots, copies: float) -> float:
    """Return `Spread.at_home` if token t lives on rank t modulo their number.

    Each rank has its own batches and prefers its own replicas. 1 without replicas.
    """
    ranks = len(placed.bounds)
    if placed.count == len(placed.slots_of_expert):
        return 1.0
    left = 0
    for home, (low, high) in enumerate(placed.bounds):
        home_sets = routing.sets_PK[home::ranks]
        for start in range(0, len(home_sets), BATCH_TOKENS):
            slots_TK = placed.of_pairs(home_sets[start : start + BATCH_TOKENS], home)
            away_TK = (slots_TK < low) | (slots_TK >= high)
            left += _distinct(placed.ranks_of(slots_TK), away_TK)
    return ranks * (1 - left / len(routing.sets_PK) / copies)


def _distinct(ranks_TK: Array, counted_TK: Bools) -> int:
    """Return the number of (token, rank) combinations among the counted pairs."""
    hits_TR = np.zeros((len(ranks_TK), int(ranks_TK.max(initial=0)) + 1), bool)
    token_N, pair_N = counted_TK.nonzero()
    hits_TR[token_N, ranks_TK[token_N, pair_N]] = True
    return int(hits_TR.sum())
