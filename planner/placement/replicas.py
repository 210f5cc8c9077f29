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
from planner.arrays import Array, Floats, Ints

MAX_RANKS = 56
MAX_TOP_K = 255
_MANY = 1e12  # more than the load of any rank
_ALL = (1 << MAX_RANKS) - 1


class RoundRobinChooser:
    """Replica choice for more than MAX_RANKS ranks: token t takes replica t modulo their number."""

    def __init__(self, slot_ER: Array) -> None:
        self._replicas_E = (slot_ER >= 0).sum(axis=1)
        self._slots_ER = np.sort(slot_ER, axis=1)[:, ::-1]

    def slots(
        self,
        topk_ids_TK: Ints,
        free_rank: int | None = None,
        weights_T: Floats | None = None,
        load_R: Floats | None = None,
    ) -> Array:
        """Return the slot of each pair [T, K]."""
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        slot_TK: Array = self._slots_ER[topk_ids_TK, token_T1 % self._replicas_E[topk_ids_TK]]
        return slot_TK


class FewestRanksChooser:
    """The rule above, for up to MAX_RANKS ranks."""

    def __init__(self, slot_ER: Array) -> None:
        self._slot_ER, self._kind = slot_ER.astype(np.int64), slot_ER.dtype
        self._sets_E: Ints = (slot_ER >= 0) @ (1 << np.arange(slot_ER.shape[1]))

    def slots(
        self,
        topk_ids_TK: Ints,
        free_rank: int | None = None,
        weights_T: Floats | None = None,
        load_R: Floats | None = None,
    ) -> Array:
        """Return the slot of each pair [T, K].

        free_rank: a rank that costs a token nothing. weights_T: equal tokens in each, default 1.
        load_R: pairs of the ranks beside these, default 0."""
        ids_TK = np.require(topk_ids_TK, np.int64, ("C", "W"))
        slot_TK, ranks = np.empty_like(ids_TK), self._slot_ER.shape[1]
        load_R = np.zeros(ranks) if load_R is None else load_R.copy()
        weights_T = np.ones(len(ids_TK)) if weights_T is None else weights_T
        free = 0 if free_rank is None else 1 << free_rank
        _choose(ids_TK, weights_T, self._sets_E, self._slot_ER, free, load_R, slot_TK)
        return slot_TK.astype(self._kind)


def replica_chooser(slot_ER: Array) -> FewestRanksChooser | RoundRobinChooser:
    """Return the choice of one layer's replicas. slot_ER: -1 on ranks without the expert."""
    chooser = FewestRanksChooser if slot_ER.shape[1] <= MAX_RANKS else RoundRobinChooser
    return chooser(slot_ER)


@functools.cache
def compile_rule() -> None:
    """Compile the rule, or read it from disk: before the first batch with replicas."""
    chooser = FewestRanksChooser(np.array([[0, 1]]))

    def call() -> None:
        chooser.slots(np.zeros((1, 1), np.int64))

    compile_on_disk(call)


@compiled
def _choose(
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
