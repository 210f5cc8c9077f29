"""Replica choice for two to eight ranks: the rule of `replicas.py`, vectorised.

The number of numpy calls depends neither on the tokens nor on the rank sets among them.

1. A token's ranks are a smallest set that covers its experts (`HittingSets`). Consecutive tokens
   take different smallest sets; large batches prefer sets without the busiest ranks.
2. A pair may go to any of the token's ranks that have its expert. If no other expert of the token
   needs that rank, the pair may go to any rank that has the expert.
3. Pairs are levelled over the ranks that they may go to (`level_ranks`).

A set of ranks is a byte, one bit per rank. Shapes: T tokens, K experts of each, N = K * T pairs, E
experts, R ranks, G groups of pairs with the same set of ranks, S = 256 sets, C = 2^R sets to choose
from, V orders of preference.
"""

import functools
from collections.abc import Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Array, Bools, Bytes, Ints
from planner.placement.replicas import PairwiseChooser

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


_FEW_ITEMS = 48  # up to this many items: one by one
_FEW_GROUPS = 20  # up to this many groups: one by one
_TURNS = 4  # parts of a batch that are divided alike
_ROUNDS = 4
_STEP = 0.8  # of the step that would level a rank alone

Group = tuple[tuple[int, ...], int]  # ranks, number of items


def levelled(groups: Sequence[Group], pairs: int, load_R: list[int]) -> list[list[int]]:
    """Return how many items of every group each of its ranks gets, in two passes.

    groups: items of `pairs` pairs each. load_R grows.
    """
    parts = [shares(ranks, items, pairs, load_R) for ranks, items in groups]
    for number, (ranks, items) in enumerate(groups if len(groups) > 1 else ()):
        own_part = iter(parts[number])
        for rank in ranks:
            load_R[rank] -= next(own_part) * pairs
        parts[number] = shares(ranks, items, pairs, load_R)
    return parts


def shares(ranks: tuple[int, ...], items: int, pairs: int, load_R: list[int]) -> list[int]:
    """Return the items of each rank: the least loaded are filled to one level. load_R grows."""
    if len(ranks) == 2:
        one, other = ranks
        first = (items * pairs + load_R[other] - load_R[one] + pairs) // (2 * pairs)
        first = 0 if first < 0 else items if first > items else first
        load_R[one] += first * pairs
        load_R[other] += (items - first) * pairs
        return [first, items - first]
    heights = [load_R[rank] for rank in ranks]
    parts = [0] * len(ranks)
    if items > len(ranks):
        level = _level(heights, items * pairs)
        parts = [max(0, (level - height) // pairs) for height in heights]
        heights = [height + part * pairs for height, part in zip(heights, parts, strict=True)]
    for _ in range(items - sum(parts)):
        lowest = heights.index(min(heights))
        parts[lowest] += 1
        heights[lowest] += pairs
    for rank, height in zip(ranks, heights, strict=True):
        load_R[rank] = height
    return parts


def _level(heights: list[int], pairs: int) -> int:
    """Return the level to which the pairs fill the lowest ranks."""
    filled, level, count = pairs, 0, 0
    for height in sorted(heights):
        if count and height * count >= filled:
            break
        filled, count = filled + height, count + 1
        level = filled // count
    return level


def level_ranks(sets_N: Bytes, ranks: int, *, spread: bool) -> Ints:
    """Return a rank of each set, such that the ranks have about equally many items.

    Few items are assigned one by one; otherwise groups of equal sets are divided. spread: divide
    consecutive items as well, since token groups are parts of a batch."""
    counts_S = np.bincount(sets_N, minlength=len(MEMBERS))
    load_R: list[int] = counts_S.take(_BIT_R[:ranks]).tolist()
    if len(sets_N) - sum(load_R) <= _FEW_ITEMS:
        return _one_by_one(sets_N, load_R)
    found_G = counts_S.nonzero()[0]
    divided = _by_group if len(found_G) <= _FEW_GROUPS else _at_once
    rank_N = np.empty(len(sets_N), np.int64)
    if spread:
        sets_N = np.concatenate([sets_N[turn::_TURNS] for turn in range(_TURNS)])
    order_N = sets_N.argsort(kind="stable")
    rank_N[order_N] = divided(found_G, counts_S.take(found_G), load_R)
    return _apart(rank_N) if spread else rank_N


def _apart(rank_N: Ints) -> Ints:
    """Undo the reordering of `level_ranks`."""
    apart_N, first = np.empty_like(rank_N), 0
    for turn in range(_TURNS):
        own_part = apart_N[turn::_TURNS]
        own_part[:] = rank_N[first : first + len(own_part)]
        first += len(own_part)
    return apart_N


def _one_by_one(sets_N: Bytes, load_R: list[int]) -> Ints:
    """Assign each item to its least loaded rank."""
    rank_N = FIRST_S.take(sets_N)
    free_N = SEVERAL_S.take(sets_N).nonzero()[0]
    given: list[int] = []
    for each in sets_N.take(free_N).tolist():
        ranks = MEMBERS[each]
        if len(ranks) == 2:
            rank, other = ranks
            if load_R[other] < load_R[rank]:
                rank = other
        else:
            rank = min(ranks, key=load_R.__getitem__)
        load_R[rank] += 1
        given.append(rank)
    rank_N[free_N] = given
    return rank_N


def _by_group(found_G: Ints, counts_G: Ints, load_R: list[int]) -> Ints:
    """Return the ranks of all items by group. load_R: items with a single rank."""
    ways = [MEMBERS[each] for each in found_G.tolist()]
    items = counts_G.tolist()
    groups = zip(ways, items, strict=True)
    given = levelled([group for group in groups if len(group[0]) > 1], 1, load_R)
    ranks: list[int] = []
    times: list[int] = []
    number = 0
    for those, count in zip(ways, items, strict=True):
        ranks += those
        if len(those) == 1:
            times.append(count)
        else:
            times += given[number]
            number += 1
    return np.array(ranks).repeat(times)


def _at_once(found_G: Ints, counts_G: Ints, load_R: list[int]) -> Ints:
    """Return the ranks of all items by group, from a weight per rank.

    Each group is divided by the weights of its ranks; in every round, overloaded ranks lose weight.
    """
    ranks = len(load_R)
    has_GR = HAS_SR[:, :ranks].take(found_G, axis=0)
    level = float(counts_G.sum()) / ranks
    shares_G = counts_G / SIZE_S.take(found_G)
    now_R = shares_G @ has_GR
    gives_R = (shares_G * (1 - 1 / SIZE_S.take(found_G))) @ has_GR  # per unit of log weight
    step_R = _STEP / (gives_R + level / 10)
    log_R: Any = 0.0
    for _ in range(_ROUNDS):
        log_R = log_R + (level - now_R) * step_R
        weight_R = np.exp(log_R)
        shares_G = counts_G / (has_GR @ weight_R)
        now_R = (shares_G @ has_GR) * weight_R
    has_GR *= weight_R
    has_GR *= shares_G[:, None]
    upto_N = has_GR.ravel().cumsum()
    ends_N = np.rint(upto_N, out=upto_N).astype(np.int64)
    ends_N[1:] -= ends_N[:-1].copy()
    return _RANKS[ranks][: len(ends_N)].repeat(ends_N)


_BIT_R = 1 << np.arange(FEW_RANKS)
_RANKS = {n: np.tile(np.arange(n), len(MEMBERS)) for n in range(1, FEW_RANKS + 1)}


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
