"""Replica choice for two to eight ranks: the rule of `replicas.py`, vectorised.

The number of numpy calls depends neither on the tokens nor on the rank sets among them.

1. A token's ranks are a smallest set that covers its experts (`rank_sets.py`). Consecutive tokens
   take different smallest sets; large batches prefer sets without the busiest ranks.
2. A pair may go to any of the token's ranks that have its expert. If no other expert of the token
   needs that rank, the pair may go to any rank that has the expert.
3. Pairs are levelled over the ranks that they may go to (`levels.py`).

Shapes: T tokens, K experts of each, N = K * T pairs, E experts, R ranks, V orders of preference.
"""

from __future__ import annotations

import functools

import numpy as np

from planner.arrays import Array, Bytes, Ints
from planner.placement.levels import level_ranks
from planner.placement.rank_sets import HAS_SR, SETS, SIZE_S, hitting_sets
from planner.placement.replicas import PairwiseChooser

_FEW_PAIRS = 24  # up to this many pairs: a scalar loop
_MANY_PAIRS = 1024  # from this many pairs on: prefer less loaded ranks
_SWEEPS = 3  # top-k from which on the order of pairs spreads a rank's pairs over the batch


class SmallGroupChooser:
    """Replica choice of one layer on two to eight ranks."""

    def __init__(self, slot_ER: Array) -> None:  # -1: the rank does not have the expert
        self._ranks = slot_ER.shape[1]
        bits_R = 1 << np.arange(self._ranks)
        self._sets_E = ((slot_ER >= 0) * bits_R).sum(axis=1)
        self._bytes_E = self._sets_E.astype(np.uint8)
        self._slot_N = slot_ER.ravel()
        self._few = PairwiseChooser(slot_ER)
        self._hitting = hitting_sets(self._ranks)

    def slots(self, topk_ids_TK: Ints, free_rank: int | None = None) -> Array:
        """Return the slot of each pair [T, K]. free_rank: a rank that costs a token nothing."""
        if topk_ids_TK.size <= _FEW_PAIRS:
            return self._few.slots(topk_ids_TK, free_rank)
        ids_KT = np.ascontiguousarray(topk_ids_TK.T)
        allowed_KT = self._allowed(ids_KT, free_rank)
        spread = len(ids_KT) < _SWEEPS and (len(ids_KT) == 1 or ids_KT.size >= _MANY_PAIRS)
        rank_N = level_ranks(allowed_KT.ravel(), self._ranks, spread=spread)
        at_KT = ids_KT * self._ranks
        at_KT += rank_N.reshape(ids_KT.shape)
        return np.ascontiguousarray(self._slot_N.take(at_KT).T)

    def _allowed(self, ids_KT: Ints, free_rank: int | None) -> Bytes:
        """Return the set of ranks that each pair may go to [K, T]."""
        sets_KT, has_KT = self._sets_E.take(ids_KT), self._bytes_E.take(ids_KT)
        if free_rank is not None:  # its experts need no other rank
            sets_KT *= (sets_KT >> free_rank & 1) == 0
        chosen_T = self._hitting.smallest(sets_KT, self._orders(sets_KT))
        if free_rank is not None:
            chosen_T |= np.uint8(1 << free_rank)
        allowed_KT: Bytes = has_KT & chosen_T
        shared_T = _in_several(allowed_KT)
        if free_rank is not None:
            shared_T |= np.uint8(1 << free_rank)
        np.copyto(allowed_KT, has_KT, where=np.logical_not(allowed_KT & shared_T))
        return allowed_KT

    def _orders(self, sets_KT: Ints) -> Ints:
        """Return the offset of each token's order of preference [T]."""
        tokens = sets_KT.shape[1]
        if sets_KT.size < _MANY_PAIRS:
            return _turn(len(self._hitting.order_VR), tokens.bit_length(), SETS)[:tokens]
        counts_S = np.bincount(sets_KT.ravel(), minlength=SETS)
        load_R = ((counts_S / SIZE_S) @ HAS_SR[:, : self._ranks]).astype(np.int64)
        best_V = (self._hitting.order_VR @ -load_R).argsort(kind="stable")
        turn_T = _turn(len(best_V) // 2, tokens.bit_length())[:tokens]
        first_T: Ints = (best_V * SETS).take(turn_T)
        return first_T


@functools.lru_cache(maxsize=32)
def _turn(orders: int, bits: int, each: int = 1) -> Ints:
    """Return each * (0, 1, ..., orders - 1), repeated to 2^bits numbers."""
    return np.arange(1 << bits) % orders * each


def _in_several(sets_KT: Bytes) -> Bytes:
    """Return the ranks that are in more than one of a token's K sets [T]."""
    if len(sets_KT) == 2:
        both_T: Bytes = sets_KT[0] & sets_KT[1]
        return both_T
    upto_KT = np.bitwise_or.accumulate(sets_KT[:-1], axis=0)
    upto_KT &= sets_KT[1:]
    several_T: Bytes = np.bitwise_or.reduce(upto_KT, axis=0)
    return several_T
