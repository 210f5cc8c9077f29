"""Which replica answers a (token, expert) pair: a token goes to the fewest ranks that have its
experts, and of equals to those with the least to do.

    experts of a token     5        9             2          7
    ranks that have it     {1}      {0, 1}        {0, 2}     {2, 3}
    answered by            1        1, where it   2          2, which has both
                                    goes anyway

1. Experts with one replica force their ranks. What these ranks have is answered there.
2. What a token lacks then goes together, to a rank that has all of it. Where none has, two experts
   go where they like; of three and more, those of the commonest rank go there, again and again
   (with up to three experts left that is the fewest).
3. Pairs that several ranks of their token could answer level the ranks' numbers of pairs.

Here for any number of ranks. Two have a shorter way (`two_ranks.py`), and so have up to eight
(`few_ranks.py`), few pairs are gone through one by one (`few_pairs.py`): where tokens are few, time
is the number of numpy's calls.

A set of ranks is an integer, a bit for each.
Shapes: T tokens, K experts of each, U tokens with experts left, E experts, R ranks, N sets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.placement.few_pairs import PairwiseChooser, members, take_commonest
from planner.placement.levels import levelled

Array = NDArray[np.int64]
Bools = NDArray[np.bool_]
Sets = NDArray[Any]  # of ranks: unsigned

MAX_RANKS = 56
MAX_TOP_K = 255
_TURNS = 4  # neighbours are divided too: what one rank gets of a batch is spread over it
_MANY = 32  # items of a set: worth to be divided in turns
_FEW_PAIRS = 128  # are gone through one by one
_OFTEN = 16  # where one pair in so many goes anywhere, others of its token may go there too


class RoundRobinChooser:
    """For more ranks than sets are made of: token t of a batch takes replica t modulo their
    number."""

    def __init__(self, slot_ER: NDArray[Any]) -> None:
        """slot_ER: -1 where the rank does not have the expert."""
        self._replicas_E = (slot_ER >= 0).sum(axis=1)
        self._slots_ER = np.sort(slot_ER, axis=1)[:, ::-1]

    def slots(self, topk_ids_TK: Array, free_rank: int | None = None) -> NDArray[Any]:
        """[T, K] slot of each pair."""
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        slot_TK: NDArray[Any] = self._slots_ER[
            topk_ids_TK, token_T1 % self._replicas_E[topk_ids_TK]
        ]
        return slot_TK


class ReplicaChooser:
    """The ranks that have each expert of a layer, and the choice among them."""

    def __init__(self, slot_ER: NDArray[Any]) -> None:
        """slot_ER: -1 where the rank does not have the expert. At most MAX_RANKS ranks."""
        self._ranks = slot_ER.shape[1]
        has_ER = slot_ER >= 0
        self._bits_R = np.array([1 << rank for rank in range(self._ranks)], np.uint64)
        self._sets_E = (has_ER * self._bits_R).sum(axis=1).astype(np.uint64)
        self._only_E = np.where(has_ER.sum(axis=1) == 1, self._sets_E, np.uint64(0))
        self._slot_N = slot_ER.ravel()
        self._few = PairwiseChooser(self._sets_E.tolist(), slot_ER.tolist(), slot_ER.dtype)

    def slots(self, topk_ids_TK: Array, free_rank: int | None = None) -> NDArray[Any]:
        """[T, K] slot of each pair; at most MAX_TOP_K of a token. free_rank: one that costs it
        nothing."""
        if topk_ids_TK.size <= _FEW_PAIRS:
            return self._few.slots(topk_ids_TK, free_rank)
        ids_KT = np.ascontiguousarray(topk_ids_TK.T)
        sets_KT = self._sets_E.take(ids_KT)
        chosen_T = np.bitwise_or.reduce(self._only_E.take(ids_KT), axis=0)
        if free_rank is not None:
            chosen_T |= self._bits_R[free_rank]
        allowed_KT = sets_KT & chosen_T
        lacks_KT = allowed_KT == 0
        if np.count_nonzero(lacks_KT):
            self._cover(chosen_T, sets_KT, allowed_KT, lacks_KT)
            np.bitwise_and(sets_KT, chosen_T, out=allowed_KT)
            apart_KT = allowed_KT == 0
            np.copyto(allowed_KT, sets_KT, where=apart_KT)
            if _OFTEN * np.count_nonzero(apart_KT) > ids_KT.size > 2 * len(chosen_T):
                bits_KT = self._bits_R.take(self._levelled(allowed_KT)) * apart_KT
                chosen_T |= np.bitwise_or.reduce(bits_KT, axis=0)
                np.bitwise_and(sets_KT, chosen_T, out=allowed_KT)
        rank_KT = self._levelled(allowed_KT)
        slot_TK: NDArray[Any] = self._slot_N.take((ids_KT * self._ranks + rank_KT).T)
        return slot_TK

    def _cover(self, chosen_T: Sets, sets_KT: Sets, allowed_KT: Sets, lacks_KT: Bools) -> None:
        """Adds to chosen_T the ranks where two experts or more go that a token lacks; of more than
        two experts also where one does."""
        load_R, left_KT = self._load(allowed_KT), sets_KT * lacks_KT
        if len(left_KT) == 2:
            common_T = left_KT[0] & left_KT[1]
        else:
            common_T = np.bitwise_and.reduce(np.where(lacks_KT, sets_KT, ~np.uint64(0)), axis=0)
            lacking_T = np.add.reduce(lacks_KT.view(np.uint8), axis=0, dtype=np.uint8)
            apart_U = ((common_T == 0) & (lacking_T > 2)).nonzero()[0]
            if apart_U.size:
                rows = left_KT[:, apart_U].T.tolist()
                chosen_T[apart_U] |= np.array([take_commonest(r, load_R) for r in rows], np.uint64)
            common_T *= lacking_T != 0
        together_U = common_T.nonzero()[0]
        if together_U.size:
            pairs = max(1, np.count_nonzero(left_KT[:, together_U]) // together_U.size)
            rank_U = self._divided(common_T[together_U], load_R, pairs)
            chosen_T[together_U] |= self._bits_R[rank_U]

    def _load(self, allowed_KT: Sets) -> list[int]:
        """Pairs of each rank that no other may answer."""
        return [int((allowed_KT == bit).sum()) for bit in self._bits_R]

    def _levelled(self, allowed_KT: Sets) -> Array:
        """The rank of each pair."""
        rank_N = self._divided(allowed_KT.ravel(), [0] * self._ranks)
        return rank_N.reshape(allowed_KT.shape)

    def _divided(self, sets_N: Sets, load_R: list[int], pairs: int = 1) -> Array:
        """A rank of each set, such that load_R, to which so many pairs of each are added, is
        level."""
        found_S, code_N, counts_S = np.unique(sets_N, return_inverse=True, return_counts=True)
        every = [members(each) for each in found_S.tolist()]
        sizes = [len(each) for each in every]
        order_S = np.argsort(sizes, kind="stable")  # those with fewest first
        groups = [(every[code], int(counts_S[code])) for code in order_S.tolist()]
        ranks, times = list[int](), list[int]()
        for (those, items), parts in zip(groups, levelled(groups, pairs, load_R), strict=True):
            if items >= _MANY:
                some = [part // _TURNS for part in parts]
                ranks += those * (_TURNS - 1)
                times += some * (_TURNS - 1)
                parts = [n - m * (_TURNS - 1) for n, m in zip(parts, some, strict=True)]
            ranks += those
            times += parts
        rank_N, place_S = np.empty(len(sets_N), np.int64), np.empty_like(order_S)
        place_S[order_S] = np.arange(len(order_S))
        rank_N[place_S[code_N].argsort(kind="stable")] = np.array(ranks, np.int64).repeat(times)
        return rank_N
