"""Pairs levelled over the ranks that may serve them.

Shapes: N items, G groups of items with the same set of ranks, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.arrays import Bytes, Ints
from planner.placement.rank_sets import FEW_RANKS, FIRST_S, HAS_SR, MEMBERS, SEVERAL_S, SIZE_S

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
