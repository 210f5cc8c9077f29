"""What a placement makes of a sample of routing, as the cost models take it.

Copies and the busiest rank's shares are means over batches of the sample: a rank that is late in a
batch is late for all, whatever other batches bring it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.costs.routing_shape import RankShare, RoutingShape, Spread
from planner.placement.routing import BATCH_TOKENS, LayerRouting
from planner.placement.slots import LayerSlots


def routing_shape(layers: Sequence[tuple[LayerRouting, LayerSlots]]) -> RoutingShape:
    """Of every layer with experts, ascending."""
    return RoutingShape(tuple(spread_of(routing, placed) for routing, placed in layers))


def spread_of(routing: LayerRouting, placed: LayerSlots) -> Spread:
    """Of one layer. A sample without tokens is refused with ValueError."""
    if not len(routing.sets_PK):
        raise ValueError("a sample of no tokens says nothing of routing")
    ranks, experts = len(placed.bounds), routing.num_experts
    bounds = np.array([low for low, _ in placed.bounds[1:]], np.int64)
    copies, shares = 0, []
    for start in range(0, len(routing.sets_PK), BATCH_TOKENS):
        slots_TK = placed.of_pairs(routing.sets_PK[start : start + BATCH_TOKENS])
        ranks_TK = np.searchsorted(bounds, slots_TK, "right")
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
    return Spread(ranks, slots, mean, busiest)
