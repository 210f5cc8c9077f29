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

Few pairs are gone through one by one (`few_pairs.py`), two ranks have a shorter way
(`two_ranks.py`): where tokens are few, time is the number of numpy's calls.

A set of ranks is an integer, a bit for each.
Shapes: T tokens, K experts of each, U tokens with experts left, E experts, R ranks, N sets.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.placement.few_pairs import FewPairs, members, take_commonest
from planner.placement.levels import levelled

Array = NDArray[np.int64]
Bools = NDArray[np.bool_]
Sets = NDArray[Any]  # of ranks: unsigned

MAX_RANKS = 56
MAX_TOP_K = 255
_NARROW_RANKS = 8
_TURNS = 4  # neighbours are divided too: what one rank gets of a batch is spread over it
_MANY = 32  # items of a set: worth to be divided in turns
_FEW_PAIRS = 128  # are gone through one by one
_OFTEN = 16  # where one pair in so many goes anywhere, others of its token may go there too
_FEW_TOKENS = 40  # with three experts left


class InTurn:
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


class Fewest:
    """The ranks that have each expert of a layer, and the choice among them."""

    def __init__(self, slot_ER: NDArray[Any]) -> None:
        """slot_ER: -1 where the rank does not have the expert. At most MAX_RANKS ranks."""
        self._ranks = slot_ER.shape[1]
        narrow = self._ranks <= _NARROW_RANKS
        self._set: Any = np.uint8 if narrow else np.uint64
        self._sets = _every_set() if narrow else None
        has_ER = slot_ER >= 0
        self._bits_R = np.array([1 << rank for rank in range(self._ranks)], self._set)
        self._sets_E = (has_ER * self._bits_R).sum(axis=1).astype(self._set)
        self._only_E = np.where(has_ER.sum(axis=1) == 1, self._sets_E, self._set(0))
        self._slot_N = slot_ER.ravel()
        self._few = FewPairs(self._sets_E.tolist(), slot_ER.tolist(), slot_ER.dtype)

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
            common_T = np.bitwise_and.reduce(np.where(lacks_KT, sets_KT, ~self._set(0)), axis=0)
            lacking_T = np.add.reduce(lacks_KT.view(np.uint8), axis=0, dtype=np.uint8)
            apart_U = ((common_T == 0) & (lacking_T > 2)).nonzero()[0]
            if apart_U.size:
                chosen_T[apart_U] |= self._commonest(left_KT[:, apart_U], load_R)
            common_T *= lacking_T != 0
        together_U = common_T.nonzero()[0]
        if together_U.size:
            pairs = max(1, np.count_nonzero(left_KT[:, together_U]) // together_U.size)
            rank_U = self._divided(common_T[together_U], load_R, pairs)
            chosen_T[together_U] |= self._bits_R[rank_U]

    def _commonest(self, left_KU: Sets, load_R: list[int]) -> Sets:
        """The ranks that have most of what each token has left, again and again while that is two
        or more; load_R grows."""
        if left_KU.shape[1] <= _FEW_TOKENS or self._sets is None:
            return np.array([take_commonest(row, load_R) for row in left_KU.T.tolist()], self._set)
        chosen_U, left_U = np.zeros(left_KU.shape[1], self._set), np.arange(left_KU.shape[1])
        while left_U.size:
            counts_UR = np.add.reduce(_BYTES[left_KU], axis=0).view(np.uint8).reshape(-1, 8)
            most_U = counts_UR.max(axis=1)
            ties_U = np.packbits(counts_UR == most_U[:, None], axis=1, bitorder="little").ravel()
            some = (most_U > 1).nonzero()[0]
            left_U, ties_U, left_KU = left_U[some], ties_U[some], left_KU[:, some]
            pairs = int(most_U[some].sum()) // max(1, some.size)
            bits_U = self._bits_R[self._divided(ties_U, load_R, pairs)]
            chosen_U[left_U] |= bits_U
            left_KU = left_KU * ((left_KU & bits_U) == 0)
        return chosen_U

    def _load(self, allowed_KT: Sets) -> list[int]:
        """Pairs of each rank that no other may answer."""
        if self._sets is None:
            return [int((allowed_KT == bit).sum()) for bit in self._bits_R]
        counts_S = np.bincount(allowed_KT.ravel(), minlength=256)
        load_R: list[int] = counts_S[self._bits_R].tolist()
        return load_R

    def _levelled(self, allowed_KT: Sets) -> Array:
        """The rank of each pair."""
        sets = self._sets
        if sets is None:
            return self._divided(allowed_KT.ravel(), [0] * self._ranks).reshape(allowed_KT.shape)
        rank_KT = sets.first_S.take(allowed_KT)
        several_N = sets.several_S.take(allowed_KT.ravel()).nonzero()[0]
        if several_N.size:
            free_N = allowed_KT.ravel()[several_N]
            rank_KT.ravel()[several_N] = self._divided(free_N, self._load(allowed_KT))
        return rank_KT

    def _divided(self, sets_N: Sets, load_R: list[int], pairs: int = 1) -> Array:
        """A rank of each set, such that load_R, to which so many pairs of each are added, is
        level."""
        if self._sets is None:
            found_S, code_N, counts_S = np.unique(sets_N, return_inverse=True, return_counts=True)
            sets = _Sets(found_S.tolist())
        else:
            sets, code_N, counts_S = self._sets, sets_N, np.bincount(sets_N, minlength=256)
        found = sets.order[counts_S[sets.order].nonzero()[0]]
        groups = [
            (sets.members[code], items)
            for code, items in zip(found.tolist(), counts_S[found].tolist(), strict=True)
        ]
        given = levelled(groups, pairs, load_R)
        ranks, times = list[int](), list[int]()
        for (those, items), parts in zip(groups, given, strict=True):
            if items >= _MANY:
                some = [part // _TURNS for part in parts]
                ranks += those * (_TURNS - 1)
                times += some * (_TURNS - 1)
                parts = [n - m * (_TURNS - 1) for n, m in zip(parts, some, strict=True)]
            ranks += those
            times += parts
        rank_N = np.empty(len(sets_N), np.int64)
        order_N = sets.place_S[code_N].argsort(kind="stable")
        rank_N[order_N] = np.array(ranks, np.int64).repeat(times)
        return rank_N


class _Sets:
    """Tables over some sets: `members`, the ranks of each; `first_S`, the first of them;
    `several_S`, whether there are more; `order`: those with fewest first, in which they are
    divided; `place_S` in it."""

    def __init__(self, sets: list[int]) -> None:
        self.members = [members(each) for each in sets]
        self.first_S = np.array([each[0] if each else 0 for each in self.members], np.int64)
        self.several_S = np.array([len(each) > 1 for each in self.members])
        sizes = [len(each) for each in self.members]
        self.order = np.argsort(sizes, kind="stable")
        self.place_S = np.empty(len(sets), np.uint8 if len(sets) <= 256 else np.int64)
        self.place_S[self.order] = np.arange(len(sets))


@functools.cache
def _every_set() -> _Sets:
    return _Sets(list(range(256)))


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BYTES = _BITS.view(np.uint64).ravel()  # of each set: a byte for each rank
