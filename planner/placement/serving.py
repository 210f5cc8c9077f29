"""Which rank serves each pair of a sample: the choice that dispatch makes (`LayerSlots.of_pairs`),
for many tokens whose experts are moved about.

A token goes to the fewest ranks that have its experts: to the rank that has most of those still
unserved, again and again, of equals to the least loaded. Exact for three experts and fewer.

Shapes: M tokens, K experts of each, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from planner.placement.sums import Bools, Floats, Ints, totals

LOOKS = 16  # at the loads, while the tokens are gone through


def serving_ranks(sets_MK: Ints, weights_M: Floats, holds_ER: Bools, load_R: Floats) -> Ints:
    """[M, K] the rank of each pair. load_R: pairs that ranks have beside these."""
    ranks_MK = np.empty_like(sets_MK)
    only_E = holds_ER.sum(1) == 1
    where_E = holds_ER.argmax(1)
    fixed_M = only_E[sets_MK].all(1)
    ranks_MK[fixed_M] = where_E[sets_MK[fixed_M]]
    K, R = sets_MK.shape[1], len(load_R)
    load_R = load_R + totals(ranks_MK[fixed_M], np.repeat(weights_M[fixed_M], K), R)
    free = np.flatnonzero(~fixed_M)
    some = max(1, -(-len(free) // LOOKS))
    for start in range(0, len(free), some):
        rows = free[start : start + some]
        chosen = _covered(sets_MK[rows], holds_ER, load_R)
        ranks_MK[rows] = chosen
        load_R = load_R + totals(chosen, np.repeat(weights_M[rows], K), R)
    return ranks_MK


def _covered(sets_MK: Ints, holds_ER: Bools, load_R: Floats) -> Ints:
    """Of tokens at once: rounds in each of which a token takes one rank more."""
    M, K = sets_MK.shape
    order_R = np.argsort(np.argsort(load_R, kind="stable"))  # 0: the least loaded
    open_MKR = holds_ER[sets_MK]
    ranks_MK = np.full((M, K), -1)
    rows = np.arange(M)
    R = len(load_R)
    while len(rows):
        held_MR = open_MKR[rows].sum(1)
        best_M = (held_MR * R - order_R).argmax(1)
        served_MK = open_MKR[rows, :, best_M]
        ranks_MK[rows] = np.where(served_MK, best_M[:, None], ranks_MK[rows])
        open_MKR[rows] &= ~served_MK[:, :, None]
        rows = rows[(ranks_MK[rows] < 0).any(1)]
    return ranks_MK
