"""Which replica answers, for few pairs: the rule of `replicas.py`, token by token.

As fast as a dozen calls of numpy while there are about a hundred pairs, and what the other ways
divide by groups is here divided one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PairwiseChooser:
    """Of each expert of a layer: the ranks that have it, a bit for each, and its slots there."""

    def __init__(self, sets_E: list[int], slot_ER: list[list[int]], kind: Any) -> None:
        self._sets_E, self._slot_ER, self._kind = sets_E, slot_ER, kind
        self._only_E = [each if not each & (each - 1) else 0 for each in sets_E]

    def slots(self, topk_ids_TK: NDArray[np.int64], free_rank: int | None) -> NDArray[Any]:
        """[T, K] slot of each pair. free_rank: one that costs a token nothing."""
        sets_E, only_E, slot_ER = self._sets_E, self._only_E, self._slot_ER
        load_R, slots = [0] * len(slot_ER[0]), list[int]()
        rows = topk_ids_TK.tolist()
        for experts in rows:
            for expert in experts:
                if only_E[expert]:
                    load_R[only_E[expert].bit_length() - 1] += 1
        free = 0 if free_rank is None else 1 << free_rank
        for experts in rows:
            chosen = free
            for expert in experts:
                chosen |= only_E[expert]
            left = [sets_E[expert] for expert in experts if not sets_E[expert] & chosen]
            if left:
                chosen |= _fewest(left, load_R)
            for expert in experts:
                ranks = members(sets_E[expert] & chosen)
                rank = ranks[0]
                for other in ranks[1:]:
                    if load_R[other] < load_R[rank]:
                        rank = other
                if not only_E[expert]:
                    load_R[rank] += 1
                slots.append(slot_ER[expert][rank])
        return np.array(slots, self._kind).reshape(topk_ids_TK.shape)


def _fewest(left: list[int], load_R: Sequence[int]) -> int:
    """The ranks that have most of what a token has left, again and again; of equals, the least
    loaded."""
    chosen = 0
    while left:
        _, ties = most(tuple(left))
        rank = min(ties, key=load_R.__getitem__)
        chosen |= 1 << rank
        left = [each for each in left if not each >> rank & 1]
    return chosen


def take_commonest(left: Sequence[int], load_R: list[int]) -> int:
    """The ranks that have most of what a token has left, again and again while that is two or
    more; load_R grows by their pairs. left: the ranks that have each expert, 0: of none."""
    chosen, sets = 0, tuple(sorted(filter(None, left)))
    found, ties = most(sets)
    while found > 1:
        rank = min(ties, key=load_R.__getitem__)
        load_R[rank] += found
        chosen |= 1 << rank
        sets = tuple(each for each in sets if not each >> rank & 1)
        found, ties = most(sets)
    return chosen


@functools.lru_cache(maxsize=1 << 14)
def most(sets: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """In how many of the sets the commonest ranks are, and which these are."""
    ranks = members(functools.reduce(int.__or__, sets, 0))
    times = [sum(each >> rank & 1 for each in sets) for rank in ranks]
    found = max(times, default=0)
    return found, tuple(rank for rank, n in zip(ranks, times, strict=True) if n == found)


@functools.lru_cache(maxsize=1 << 14)
def members(ranks: int) -> tuple[int, ...]:
    """The ranks of a set."""
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
