"""Which replica answers a (token, expert) pair: a token goes to the fewest ranks that have its
experts, and of equals to those with the least to do.

    experts of a token     5        9             2          7
    ranks that have it     {1}      {0, 1}        {0, 2}     {2, 3}
    answered by            1        1, where it   2          2, which has both
                                    goes anyway

Few tokens need more than the first two steps. Only these go on: to the rank that has most of what
is left, again and again (with up to three experts left that is the fewest). Then the pairs that
several ranks of their token could answer level the ranks' numbers of pairs.

A set of ranks is an integer, a bit for each; a key is one with a number of pairs above its bits.
Shapes: T tokens, K experts of each, U tokens with experts left, E experts, R ranks, N keys.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Sets = NDArray[Any]  # of ranks, or keys: unsigned

MAX_RANKS = 56
MAX_TOP_K = 255
_NARROW_RANKS = 8
_LOWEST = np.array([(ranks & -ranks).bit_length() - 1 for ranks in range(256)], np.int64)
_POWERS = np.uint64(1) << np.arange(MAX_RANKS, dtype=np.uint64)
_TURNS = 4  # neighbours are divided too: what one rank gets of a batch is spread over it


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
        experts, self._ranks = slot_ER.shape
        narrow = self._ranks <= _NARROW_RANKS
        self._set: Any = np.uint8 if narrow else np.uint64
        self._key: Any = np.uint16 if narrow else np.uint64
        self._bits = _NARROW_RANKS if narrow else MAX_RANKS
        has_ER = np.zeros((experts + 1, 8 * self._set().itemsize), bool)  # the last is no expert
        has_ER[:-1, : self._ranks] = slot_ER >= 0
        self._sets_E = self._packed(has_ER)
        self._only_E = np.where(has_ER.sum(axis=1) == 1, self._sets_E, self._set(0))
        self._counts_EW = has_ER.astype(np.uint8).view(np.uint64)  # a byte for each rank
        self._slot_N = slot_ER.ravel()

    def slots(self, topk_ids_TK: Array, free_rank: int | None = None) -> NDArray[Any]:
        """[T, K] slot of each pair; at most MAX_TOP_K of a token. free_rank: one that costs it
        nothing."""
        ids_KT = np.ascontiguousarray(topk_ids_TK.T)
        sets_KT = self._sets_E[ids_KT]
        chosen_T = np.bitwise_or.reduce(self._only_E[ids_KT], axis=0)
        if free_rank is not None:
            chosen_T |= self._set(1 << free_rank)
        allowed_KT = sets_KT & chosen_T
        lacks_KT = allowed_KT == 0
        if np.count_nonzero(lacks_KT):
            tokens_U = np.bitwise_or.reduce(lacks_KT, axis=0).nonzero()[0]
            chosen_U, load_R = chosen_T[tokens_U], self._fixed_load(allowed_KT)
            self._cover(ids_KT[:, tokens_U], lacks_KT[:, tokens_U], chosen_U, load_R)
            chosen_T[tokens_U] = chosen_U
            allowed_KT = sets_KT & chosen_T
        slot_TK: NDArray[Any] = self._slot_N[(ids_KT * self._ranks + self._levelled(allowed_KT)).T]
        return slot_TK

    def _cover(
        self, ids_KU: Array, lacks_KU: NDArray[np.bool_], chosen_U: Sets, load_R: list[int]
    ) -> None:
        """Adds to chosen_U the fewest ranks that have what a token lacks, and to load_R its
        pairs."""
        left_U, none = np.arange(len(chosen_U)), len(self._sets_E) - 1
        while left_U.size:
            ids_KU = np.where(lacks_KU, ids_KU, none)
            counts_UR = np.add.reduce(self._counts_EW[ids_KU], axis=0).view(np.uint8)
            most_U = counts_UR.max(axis=1)
            keys_U = self._packed(counts_UR == most_U[:, None]).astype(self._key)
            keys_U |= most_U.astype(self._key) << self._key(self._bits)
            rank_U = self._divided(keys_U, load_R)
            chosen_U[left_U] |= self._set(1) << rank_U.astype(self._set)
            lacks_KU = (self._sets_E[ids_KU] & chosen_U[left_U]) == 0
            lacks_KU &= ids_KU != none
            more_U = np.bitwise_or.reduce(lacks_KU, axis=0).nonzero()[0]
            left_U, ids_KU, lacks_KU = left_U[more_U], ids_KU[:, more_U], lacks_KU[:, more_U]

    def _levelled(self, allowed_KT: Sets) -> Array:
        """The rank of each pair, of those allowed."""
        rank_KT = _lowest(allowed_KT)
        free_N = (allowed_KT & (allowed_KT - self._set(1))).ravel().nonzero()[0]
        if free_N.size:
            free_N = np.concatenate([free_N[turn::_TURNS] for turn in range(_TURNS)])
            keys_N = allowed_KT.ravel()[free_N].astype(self._key)
            keys_N |= self._key(1 << self._bits)
            rank_KT.ravel()[free_N] = self._divided(keys_N, self._fixed_load(allowed_KT))
        return rank_KT

    def _fixed_load(self, allowed_KT: Sets) -> list[int]:
        """Pairs of each rank that no other may answer."""
        sets = [1 << rank for rank in range(self._ranks)]
        if self._set is np.uint8:
            counts: list[int] = np.bincount(allowed_KT.ravel(), minlength=256)[sets].tolist()
            return counts
        return [int((allowed_KT == self._set(ranks)).sum()) for ranks in sets]

    def _divided(self, keys_N: Sets, load_R: list[int]) -> Array:
        """A rank of each set, such that load_R, to which their pairs are added, is level."""
        order_N = keys_N.argsort(kind="stable")
        sorted_N = keys_N[order_N]
        edges = [0, *((sorted_N[1:] != sorted_N[:-1]).nonzero()[0] + 1).tolist(), len(keys_N)]
        keys = sorted_N[edges[:-1]].tolist()
        bits, mask = self._bits, (1 << self._bits) - 1
        groups = [
            (_members(key & mask), stop - start, key >> bits)
            for key, (start, stop) in zip(keys, pairwise(edges), strict=True)
        ]
        for ranks, items, pairs in groups:
            if len(ranks) == 1:
                load_R[ranks[0]] += items * pairs
        all_ranks, times = list[int](), list[int]()
        for ranks, items, pairs in reversed(groups):  # those of most pairs first
            all_ranks += ranks
            times += _shares(ranks, items, pairs, load_R) if len(ranks) > 1 else [items]
        rank_N = np.empty(len(keys_N), np.int64)
        rank_N[order_N[::-1]] = np.array(all_ranks).repeat(times)
        return rank_N

    def _packed(self, has_NR: NDArray[np.bool_]) -> Sets:
        sets_N: Sets = np.packbits(has_NR, axis=1, bitorder="little").view(self._set).ravel()
        return sets_N


def _lowest(sets_N: Sets) -> Array:
    """The first rank of each set; none is empty."""
    if sets_N.dtype == np.uint8:
        return _LOWEST.take(sets_N)
    return np.searchsorted(_POWERS, sets_N & -sets_N)


@functools.lru_cache(maxsize=1 << 14)
def _members(ranks: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def _shares(ranks: tuple[int, ...], items: int, pairs: int, load_R: list[int]) -> list[int]:
    """How many of the items, of that many pairs each, every rank gets: the least loaded are filled
    to one level. load_R grows."""
    if len(ranks) == 2:
        one, other = ranks
        twice = items * pairs + load_R[other] - load_R[one] + pairs
        first = min(items, max(0, twice // (2 * pairs)))
        load_R[one] += first * pairs
        load_R[other] += (items - first) * pairs
        return [first, items - first]
    heights = [load_R[rank] for rank in ranks]
    shares = [0] * len(ranks)
    if items > len(ranks):
        level = _level(heights, items * pairs)
        shares = [max(0, (level - height) // pairs) for height in heights]
        heights = [height + share * pairs for height, share in zip(heights, shares, strict=True)]
    for _ in range(items - sum(shares)):
        lowest = heights.index(min(heights))
        shares[lowest] += 1
        heights[lowest] += pairs
    for rank, height in zip(ranks, heights, strict=True):
        load_R[rank] = height
    return shares


def _level(heights: list[int], pairs: int) -> int:
    """To which so many pairs fill the lowest."""
    filled, level, count = pairs, 0, 0
    for height in sorted(heights):
        if count and height * count >= filled:
            break
        filled, count = filled + height, count + 1
        level = filled // count
    return level
