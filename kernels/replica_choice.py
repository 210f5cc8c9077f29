"""Compiled choice of the replica that serves each (token, expert) pair.

A token goes to the fewest ranks that have its experts, among these to the least loaded.

    experts of a token     5        9             2          7
    ranks with the expert  {1}      {0, 1}        {0, 2}     {2, 3}
    served by              1        1, used       2          2, which has both
                                    anyway

1. Experts with one replica determine their ranks. These ranks serve the other experts they have.
2. For the remaining experts, the rank that has most of them is added, repeatedly.
3. Pairs that several ranks of their token could serve level the ranks' loads.

Tokens are served in turn. The load of a rank is its pairs so far, and from the start the pairs of
experts with one replica. A set of ranks is an integer with a bit per rank. Shapes: T tokens, K
experts of each, E experts, R ranks.
"""

from typing import Any, Final

import numpy as np

from kernels.compiled import compiled

MAX_RANKS: Final = 56
_MANY: Final = 1e12  # more than the load of any rank
_ALL: Final = (1 << MAX_RANKS) - 1


@compiled
def choose_replicas(
    ids_TK: Any, weights_T: Any, sets_E: Any, slot_ER: Any, free: int, load_R: Any, slot_TK: Any
) -> None:
    """Fill in the slots. sets_E: ranks of each expert. free: set of ranks."""
    tokens, top_k = ids_TK.shape
    for t in range(tokens):
        for k in range(top_k):
            if _is_single(sets_E[ids_TK[t, k]]):
                _add(load_R, sets_E[ids_TK[t, k]], weights_T[t])
    cost_R, sets_K = np.empty_like(load_R), np.empty(top_k, np.int64)
    for t in range(tokens):
        chosen = free
        for k in range(top_k):
            sets_K[k] = sets_E[ids_TK[t, k]]
            chosen |= sets_K[k] if _is_single(sets_K[k]) else 0
        while True:
            cost_R[:] = load_R
            for k in range(top_k):
                if not sets_K[k] & chosen:
                    _add(cost_R, sets_K[k], -_MANY)
            best = _cheapest(cost_R, _ALL)
            if cost_R[best] >= 0:  # no expert is left
                break
            chosen |= 1 << best
        for k in range(top_k):
            rank = _cheapest(load_R, sets_K[k] & chosen)
            if not _is_single(sets_K[k]):
                load_R[rank] += weights_T[t]
            slot_TK[t, k] = slot_ER[ids_TK[t, k], rank]


@compiled
def _is_single(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


@compiled
def _add(values_R: Any, ranks: int, value: float) -> None:
    """Add a value to those of a set of ranks."""
    for rank in range(len(values_R)):
        values_R[rank] += (ranks >> rank & 1) * value


@compiled
def _cheapest(cost_R: Any, ranks: int) -> int:
    """Return the rank of a set with the least cost, the first of equals."""
    best, least = 0, 2 * _MANY
    for rank in range(len(cost_R)):
        cost = cost_R[rank] if ranks >> rank & 1 else 2 * _MANY
        if cost < least:
            best, least = rank, cost
    return best
