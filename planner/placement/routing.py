"""Routing samples of a layer: the experts that its tokens were routed to.

Shapes: P sampled tokens, K experts of each, R ranks, N entries of a table of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from planner.arrays import Array, Ints
from planner.placement.slots import LayerSlots

BATCH_TOKENS = 2048  # of a batch


class TokenCounts(NamedTuple):
    """Number of times that each token id was routed to each expert, by ascending id, then expert.

    The rarest entries may be missing."""

    ids_N: Ints
    experts_N: Ints
    times_N: Ints


class LayerRouting(NamedTuple):
    """Sample of a layer: experts of each token in the router's order, and token ids."""

    num_experts: int
    sets_PK: Ints
    ids_P: Ints
    counts: TokenCounts

    def load(self) -> Ints:
        """Return the pairs of each expert in the sample [E]."""
        return np.bincount(self.sets_PK.ravel(), minlength=self.num_experts)


class Measured(NamedTuple):
    """Figures of a placement on a sample.

    copies: mean number of ranks that a token is sent to. load: pairs of the busiest rank over the
    mean, for the whole sample; batch_load: the mean of the same per batch."""

    copies: float
    load: float
    batch_load: float


def batches_of_ranks(routing: LayerRouting, placed: LayerSlots) -> Iterator[Array]:
    """Yield the rank that serves each pair [T, K], for BATCH_TOKENS tokens at a time."""
    for start in range(0, len(routing.sets_PK), BATCH_TOKENS):
        yield placed.ranks_of(placed.of_pairs(routing.sets_PK[start : start + BATCH_TOKENS]))


def measure(routing: LayerRouting, placed: LayerSlots) -> Measured:
    """Return the figures of a placement on the sample."""
    ranks, tokens = len(placed.bounds), len(routing.sets_PK)
    copies, pairs_R, batch_loads = 0, np.zeros(ranks, np.int64), []
    for ranks_TK in batches_of_ranks(routing, placed):
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


def local_fraction(routing: LayerRouting, placed: LayerSlots, rank_of_id_V: Ints) -> float:
    """Return the share of pairs whose expert is on the rank of their token's id (LAR).

    Replicas count on every rank.
    """
    held_ER = placed.held(routing.num_experts)
    here_PK = held_ER[routing.sets_PK, rank_of_id_V[routing.ids_P][:, None]]
    return float(here_PK.mean()) if here_PK.size else 0.0
