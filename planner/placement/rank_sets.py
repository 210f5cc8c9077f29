"""Sets of up to eight ranks as bytes, one bit per rank, with look-up tables.

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
_STEPS = (1, 10, 3, 8)  # through the ranks, modulo 11: forward and back
_NARROW_RANKS = 4  # up to 16 candidates: the highest bit is a table look-up
_ONE = np.uint64(1)

MEMBERS = tuple(
    tuple(rank for rank in range(FEW_RANKS) if each >> rank & 1) for each in range(SETS)
)
FIRST_S = np.array([each[0] if each else 0 for each in MEMBERS])
SEVERAL_S = np.array([len(each) > 1 for each in MEMBERS])
SIZE_S = np.array([max(1, len(each)) for each in MEMBERS])
HAS_SR = (np.arange(SETS)[:, None] >> np.arange(FEW_RANKS) & 1).astype(np.float64)


class HittingSets(NamedTuple):
    """Table of the smallest set of ranks that intersects each of several sets.

    Candidate sets are sorted, the smallest last, equal sizes by an order of preference. For each
    set of ranks, `hits_WVS` has one bit per candidate that intersects it, in 64-bit words; the
    empty set accepts all. The intersection over several sets has a bit for each candidate that hits
    them all, of which the highest is best.

    `order_VR`: rank of preference, most wanted first. `chosen_VS`: the candidate at each bit (the
    first C of S)."""

    ranks: int
    order_VR: Ints
    hits_WVS: Array
    chosen_VS: Bytes

    def smallest(self, sets_KT: Ints, first_T: Ints) -> Bytes:
        """Return a smallest set of ranks per token [T]; first_T: S times its preference order."""
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
    """Return the table for a number of ranks. Each rank comes first in four orders."""
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
    """Return the bits as words [W, S]; the last candidate has the highest bit."""
    bytes_SB = np.packbits(hit_SC, axis=1, bitorder="little")
    if hit_SC.shape[1] <= 16:
        bytes_SB = np.pad(bytes_SB, ((0, 0), (0, 2 - bytes_SB.shape[1])))
        return np.ascontiguousarray(bytes_SB.view(np.uint16).T)
    bytes_SB = np.pad(bytes_SB, ((0, 0), (0, -bytes_SB.shape[1] % 8)))
    return np.ascontiguousarray(bytes_SB.view(np.uint64).T)


@functools.cache
def _first_word(ranks: int, top_k: int) -> int:
    """Return the first word that matters: no token needs more ranks than it has experts."""
    larger = sum(comb(ranks, size) for size in range(top_k + 1, ranks + 1))
    return larger // 64


def _highest(bits_WT: NDArray[np.uint64], first: int) -> Ints:
    """Return the number of the highest bit [T], from a float's exponent; words count from `first`.

    A bit below a set bit is cleared, since the conversion could round up to the next power of two.
    """
    highest_WT = (bits_WT & ~(bits_WT >> _ONE)).astype(np.float64)
    sum_T = _WEIGHT_W[first : first + len(bits_WT)] @ highest_WT
    bit_T: Ints = (sum_T.view(np.int64) >> 52) - 1023
    return bit_T


_HIGHEST_BIT = np.frexp(np.arange(1 << 16))[1].clip(1).astype(np.int64) - 1  # of 16
_WEIGHT_W = 2.0 ** (64 * np.arange(4))
