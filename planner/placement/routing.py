"""Routing as placement sees it, layer by layer: which experts the tokens of a sample went to.

Shapes: P sampled tokens, K experts of each, R ranks, N entries of a table of token ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.placement.slots import LayerSlots

Array = NDArray[np.int64]

BATCH_TOKENS = 2048  # replicas are chosen, and loads compared, batch by batch


class TokenCounts(NamedTuple):
    """How often token ids went to experts: (id, expert, times) of each pair that occurred, by
    ascending id, then expert. What was seen least may have been left out."""

    ids_N: Array
    experts_N: Array
    times_N: Array


class LayerRouting(NamedTuple):
    """sets_PK: experts of each sampled token, in the router's order. ids_P: its token id."""

    num_experts: int
    sets_PK: Array
    ids_P: Array
    counts: TokenCounts

    def load(self) -> Array:
        """[E] pairs of each expert in the sample."""
        return np.bincount(self.sets_PK.ravel(), minlength=self.num_experts)


class Measured(NamedTuple):
    """copies: ranks that a token is sent to, mean. load: pairs of the busiest rank over the mean,
    of the whole sample; batch_load: the same of each batch, mean."""

    copies: float
    load: float
    batch_load: float


def measure(routing: LayerRouting, placed: LayerSlots) -> Measured:
    """What that placement of the layer's experts makes of the sample, batch by batch."""
    bounds = np.array([low for low, _ in placed.bounds[1:]], np.int64)
    ranks, tokens = len(placed.bounds), len(routing.sets_PK)
    copies, pairs_R, batch_loads = 0, np.zeros(ranks, np.int64), []
    for start in range(0, tokens, BATCH_TOKENS):
        slots_TK = placed.of_pairs(routing.sets_PK[start : start + BATCH_TOKENS])
        ranks_TK = np.searchsorted(bounds, slots_TK, "right")
        ordered_TK = np.sort(ranks_TK, axis=1)
        copies += len(ordered_TK) + int((ordered_TK[:, 1:] != ordered_TK[:, :-1]).sum())
        of_batch_R = np.bincount(ranks_TK.ravel(), minlength=ranks)
        batch_loads.append(of_batch_R.max() / of_batch_R.mean())
        pairs_R += of_batch_R
    return Measured(
        copies / max(1, tokens),
        float(pairs_R.max() / pairs_R.mean()) if tokens else 1.0,
        float(np.mean(batch_loads)) if batch_loads else 1.0,
    )


def local_fraction(routing: LayerRouting, placed: LayerSlots, rank_of_id_V: Array) -> float:
    """LAR: the share of (token, expert) pairs whose expert is on the rank that the token's id is
    given to. Replicas count wherever they are."""
    held_ER = placed.held(routing.num_experts)
    here_PK = held_ER[routing.sets_PK, rank_of_id_V[routing.ids_P][:, None]]
    return float(here_PK.mean()) if here_PK.size else 0.0
