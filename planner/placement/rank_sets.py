"""Sets of up to eight ranks as bytes, a bit for each rank: what is looked up of them.

Shapes: S = 256 sets, R ranks, T tokens, V orders of preference, C = 2^R sets to choose from.
"""

from __future__ import annotations

import functools
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Array, Bools, Bytes, Ints

FEW_RANKS = 8
SETS = 1 << FEW_RANKS
_STEPS = (1, 10, 3, 8)  # through the ranks, modulo 11: there and back
_NARROW_RANKS = 4  # their sets of sets have 16 bits, of which the highest is looked up
_ONE = np.uint64(1)

MEMBERS = tuple(
    tuple(rank for rank in range(FEW_RANKS) if each >> rank & 1) for each in range(SETS)
)
FIRST_S = np.array([each[0] if each else 0 for each in MEMBERS])
SEVERAL_S = np.array([len(each) > 1 for each in MEMBERS])
SIZE_S = np.array([max(1, len(each)) for each in MEMBERS])
HAS_SR = (np.arange(SETS)[:, None] >> np.arange(FEW_RANKS) & 1).astype(np.float64)


class HittingSets(NamedTuple):
    """Of R ranks: the smallest set that has a rank of each of some sets.

    Sets to choose from stand in a line, the smallest last, those of a size by an order of
    preference; of each set of ranks `hits_WVS` has a bit for every one in the line that has a rank
    of it (in 64-bit words). What several sets of ranks have in common are those that do for all,
    and the highest bit is the best. The empty set of ranks is content with any.

    `order_VR`: how much each order wants a rank last. `chosen_VS`: the set at each bit (the first C
    of S).
    """

    ranks: int
    order_VR: Ints
    hits_WVS: Array
    chosen_VS: Bytes

    def smallest(self, sets_KT: Ints, first_T: Ints) -> Bytes:
        """[T] set of ranks with one of each of a token's. first_T: its order of preference,
        S times."""
        at_KT = sets_KT + first_T
        if self.ranks <= _NARROW_RANKS:
            hits_T: Array = np.bitwise_and.reduce(self.hits_WVS[0].take(at_KT), axis=0)
            bit_T = _HIGHEST_BIT.take(hits_T)
        else:
            first = _first_word(self.ranks, len(sets_KT))
            hits_WKT = self.hits_WVS[first:].take(at_KT, axis=1)
            bit_T = _highest(np.bitwise_and.reduce(hits_WKT, axis=1), first)
        chosen_T: Bytes = self.chosen_VS.take(bit_T + first_T)
        return chosen_T


@functools.cache
def hitting_sets(ranks: int) -> HittingSets:
    """Orders of preference: each rank is first in turn, in four ways of going round."""
    sets_C, number_R = np.arange(1 << ranks), np.arange(ranks)
    has_CR = sets_C[:, None] >> number_R & 1
    orders, hits, chosen = list[Ints](), list[Any](), list[Bytes]()
    for step in _STEPS:
        round_R = ((number_R + 1) * step % 11).argsort()
        for turn in range(ranks):
            order_R = np.empty(ranks, np.int64)
            order_R[round_R] = (number_R + turn) % ranks
            wanted_C = has_CR @ (1 << (ranks - 1 - order_R))
            best_last = ((has_CR.sum(axis=1) << ranks) - wanted_C).argsort()[::-1]
            hit_SC = (np.arange(SETS)[:, None] & best_last) != 0
            hit_SC[0] = True
            orders.append(order_R)
            hits.append(_words(hit_SC))
            chosen.append(np.resize(best_last, SETS).astype(np.uint8))
    hits_WVS = np.concatenate(hits, axis=1)
    return HittingSets(ranks, np.array(orders), hits_WVS, np.concatenate(chosen))


def _words(hit_SC: Bools) -> Array:
    """[W, S] its bits: the last of C is the highest."""
    bytes_SB = np.packbits(hit_SC, axis=1, bitorder="little")
    if hit_SC.shape[1] <= 16:
        bytes_SB = np.pad(bytes_SB, ((0, 0), (0, 2 - bytes_SB.shape[1])))
        return np.ascontiguousarray(bytes_SB.view(np.uint16).T)
    bytes_SB = np.pad(bytes_SB, ((0, 0), (0, -bytes_SB.shape[1] % 8)))
    return np.ascontiguousarray(bytes_SB.view(np.uint64).T)


@functools.cache
def _first_word(ranks: int, top_k: int) -> int:
    """Of a line: no token wants more ranks than experts, larger sets are not looked at."""
    larger = sum(comb(ranks, size) for size in range(top_k + 1, ranks + 1))
    return larger // 64


def _highest(bits_WT: NDArray[np.uint64], first: int) -> Ints:
    """[T] number of the highest bit, where words are counted from `first`: the exponent of a
    float. A bit below a set one is left out, lest a number be rounded up to the next power."""
    highest_WT = (bits_WT & ~(bits_WT >> _ONE)).astype(np.float64)
    sum_T = _WEIGHT_W[first : first + len(bits_WT)] @ highest_WT
    bit_T: Ints = (sum_T.view(np.int64) >> 52) - 1023
    return bit_T


_HIGHEST_BIT = np.frexp(np.arange(1 << 16))[1].clip(1).astype(np.int64) - 1  # of 16
_WEIGHT_W = 2.0 ** (64 * np.arange(4))
