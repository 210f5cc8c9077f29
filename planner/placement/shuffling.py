"""Assignment of a batch's tokens to workers in equal shards (Speculative MoE's s-TS, Algorithm 2).

    token 0 1 2 3 4 5 ──> predicted share of its pairs on each worker ──> order 0 2 5 | 1 3 4

A token's prediction is that of its id, or that of the workers with most of its experts in the two
layers before, whichever is more confident. Shards are equal, as a reduce-scatter needs them: from
the unshuffled order, the tokens of two workers at a time are divided anew by the difference of
their shares, which is the optimum for two workers. So the sum of shares never falls.

Shapes: T tokens, P sampled ones, K experts of each, E experts, V token ids, W workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import PRIOR_TOKENS, TokenCounts, share_table

MAX_ROUNDS = 8  # over all pairs of workers; two or three are usual


class ShareTables(NamedTuple):
    """Predicted shares of a layer.

    of_id_VW: by token id, with the mean as last row. of_two_AW: by the workers of the two previous
    layers, the earlier one times W plus the later one; None for the first two layers."""

    of_id_VW: Floats
    of_two_AW: Floats | None

    def predict(self, ids_T: Ints, before_T2: Ints | None) -> Floats:
        """Return the shares [T, W]. before_T2: workers of two layers before, the earlier first."""
        of_id_TW = self.of_id_VW[np.minimum(ids_T, len(self.of_id_VW) - 1)]
        if self.of_two_AW is None or before_T2 is None:
            return of_id_TW
        W = of_id_TW.shape[1]
        of_two_TW = self.of_two_AW[before_T2[:, 0] * W + before_T2[:, 1]]
        is_surer_T = of_two_TW.max(1) > of_id_TW.max(1)
        return np.where(is_surer_T[:, None], of_two_TW, of_id_TW)


def share_tables(counts: TokenCounts, layers: Sequence[tuple[Ints, Bools]]) -> ShareTables:
    """Return the tables of the last of `layers`.

    counts: of that layer. layers: experts of sampled tokens [P, K], in the router's order, and
    experts on each worker [E, W], of up to two layers before and of the layer itself."""
    sets_PK, holds_EW = layers[-1]
    top_k = sets_PK.shape[1]
    of_id_VW = share_table([(counts, holds_EW)], top_k)
    if len(layers) < 3:
        return ShareTables(of_id_VW, None)
    W = holds_EW.shape[1]
    earlier_P, later_P = (main_workers(*layer) for layer in layers[-3:-1])
    condition_P = earlier_P * W + later_P
    local_PW = holds_EW[sets_PK].sum(1)
    pairs_AW = np.stack([totals(condition_P, each_P, W * W) for each_P in local_PW.T], 1)
    pairs_A1 = top_k * np.bincount(condition_P, minlength=W * W)[:, None]
    prior = PRIOR_TOKENS * top_k
    mean_W = local_PW.mean(0) / top_k if len(local_PW) else np.zeros(W)
    return ShareTables(of_id_VW, (pairs_AW + prior * mean_W) / (pairs_A1 + prior))


def main_workers(sets_TK: Ints, holds_EW: Bools) -> Ints:
    """Return the worker with most of each token's experts; of equals that of the first expert."""
    held_TKW = holds_EW[sets_TK]
    found: Ints = (2 * held_TKW.sum(1) + held_TKW[:, 0]).argmax(1)
    return found


def shard_bounds(tokens: int, workers: int) -> Ints:
    """Return the first token of each shard, and their end [W + 1]; the first are one longer."""
    sizes_W = tokens // workers + (np.arange(workers) < tokens % workers)
    return np.concatenate([[0], np.cumsum(sizes_W)])


def shuffled_order(shares_TW: Floats) -> Ints:
    """Return the tokens in the order of their workers [T], ascending within each shard.

    Equal shares give equal orders on every worker."""
    tokens, workers = shares_TW.shape
    bounds = shard_bounds(tokens, workers)
    worker_T: Ints = np.repeat(np.arange(workers), np.diff(bounds))
    for _ in range(MAX_ROUNDS):
        before_T = worker_T.copy()
        for one, other in itertools.combinations(range(workers), 2):
            _divide(worker_T, shares_TW[:, one] - shares_TW[:, other], one, other)
        if (worker_T == before_T).all():
            break
    return worker_T.argsort(kind="stable")


def _divide(worker_T: Ints, gain_T: Floats, one: int, other: int) -> None:
    """Divide the tokens of two workers by the gain of the first one, in place.

    Of equal gains, tokens stay where they are."""
    both = np.flatnonzero((worker_T == one) | (worker_T == other))
    is_one = worker_T[both] == one
    order = np.lexsort((~is_one, -gain_T[both]))
    size = int(is_one.sum())
    worker_T[both[order[:size]]] = one
    worker_T[both[order[size:]]] = other
