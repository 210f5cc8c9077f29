"""Choice of the replica that serves each (token, expert) pair.

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

import functools
from typing import Any

import numpy as np

from kernels.compiled import compile_on_disk, compiled
from planner.arrays import Array, Ints

MAX_RANKS = 56
MAX_TOP_K = 255
_MANY = 1 << 40  # more than the load of any rank
_ALL = (1 << MAX_RANKS) - 1


class RoundRobinChooser:
    """Replica choice for more than MAX_RANKS ranks: token t takes replica t modulo their number."""

    def __init__(self, slot_ER: Array) -> None:  # -1: the rank does not have the expert
        self._replicas_E = (slot_ER >= 0).sum(axis=1)
        self._slots_ER = np.sort(slot_ER, axis=1)[:, ::-1]

    def slots(self, topk_ids_TK: Ints, free_rank: int | None = None) -> Array:
        """Return the slot of each pair [T, K]."""
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        slot_TK: Array = self._slots_ER[topk_ids_TK, token_T1 % self._replicas_E[topk_ids_TK]]
        return slot_TK


class FewestRanksChooser:
    """The rule above, for up to MAX_RANKS ranks."""

    def __init__(self, slot_ER: Array) -> None:  # -1: the rank does not have the expert
        self._slot_ER, self._kind = slot_ER.astype(np.int64), slot_ER.dtype
        self._sets_E: Ints = (slot_ER >= 0) @ (1 << np.arange(slot_ER.shape[1]))

    def slots(self, topk_ids_TK: Ints, free_rank: int | None = None) -> Array:
        """Return the slot of each pair [T, K]. free_rank: a rank that costs a token nothing."""
        ids_TK = np.require(topk_ids_TK, np.int64, ("C", "W"))
        slot_TK, load_R = np.empty_like(ids_TK), np.zeros(self._slot_ER.shape[1], np.int64)
        free = 0 if free_rank is None else 1 << free_rank
        _choose(ids_TK, self._sets_E, self._slot_ER, free, load_R, slot_TK)
        return slot_TK.astype(self._kind)


@functools.cache
def compile_rule() -> None:
    """Compile the rule, or read it from disk: before the first batch with replicas."""
    chooser = FewestRanksChooser(np.array([[0, 1]]))

    def call() -> None:
        chooser.slots(np.zeros((1, 1), np.int64))

    compile_on_disk(call)


@compiled
def _choose(ids_TK: Any, sets_E: Any, slot_ER: Any, free: int, load_R: Any, slot_TK: Any) -> None:
    """Fill in the slots. sets_E: ranks of each expert. free: set of ranks. load_R: zeros."""
    tokens, top_k = ids_TK.shape
    for t in range(tokens):
        for k in range(top_k):
            if _is_single(sets_E[ids_TK[t, k]]):
                _add(load_R, sets_E[ids_TK[t, k]], 1)
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
            load_R[rank] += not _is_single(sets_K[k])
            slot_TK[t, k] = slot_ER[ids_TK[t, k], rank]


@compiled
def _is_single(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


@compiled
def _add(values_R: Any, ranks: int, value: int) -> None:
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
