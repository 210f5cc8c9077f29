"""Choice of the replica that serves each (token, expert) pair.

A token goes to the fewest ranks that have its experts, among these to the least loaded.

    experts of a token     5        9             2          7
    ranks with the expert  {1}      {0, 1}        {0, 2}     {2, 3}
    served by              1        1, used       2          2, which has both
                                    anyway

1. Experts with one replica determine their ranks. These ranks serve the other experts they have.
2. For the remaining experts, the rank that has most of them is added, repeatedly.
3. Pairs that several ranks of their token could serve level the ranks' loads.

`PairwiseChooser` is the rule; `few_ranks.py` computes it in numpy for up to eight ranks and many
pairs. A set of ranks is an integer with a bit per rank. Shapes: T tokens, K experts of each, E
experts, R ranks.
"""

import functools
from collections.abc import Sequence

import numpy as np

from planner.arrays import Array, Ints

MAX_RANKS = 56
MAX_TOP_K = 255


class RoundRobinChooser:
    """Replica choice for more than MAX_RANKS ranks: token t takes replica t modulo their number."""

    def __init__(self, slot_ER: Array) -> None:  # -1: the rank does not have the expert
        self._replicas_E = (slot_ER >= 0).sum(axis=1)
        self._slots_ER = np.sort(slot_ER, axis=1)[:, ::-1]

    def slots(self, topk_ids_TK: Ints, free_rank: int | None = None) -> Array:
        """Return the slot of each pair [T, K]."""
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        slot_TK: Array = self._slots_ER[topk_ids_TK, token_T1 % self._replicas_E[topk_ids_TK]]
        return slot_TK


class PairwiseChooser:
    """The rule in a scalar loop for up to MAX_RANKS ranks; as fast as numpy for 100 pairs."""

    def __init__(self, slot_ER: Array) -> None:  # -1: the rank does not have the expert
        self._slot_ER: list[list[int]] = slot_ER.tolist()
        self._kind = slot_ER.dtype
        self._sets_E = [
            sum(1 << rank for rank, slot in enumerate(slots) if slot >= 0)
            for slots in self._slot_ER
        ]
        self._only_E = [each if not each & (each - 1) else 0 for each in self._sets_E]

    def slots(self, topk_ids_TK: Ints, free_rank: int | None) -> Array:
        """Return the slot of each pair [T, K]. free_rank: a rank that costs a token nothing."""
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
    """Return a small set of ranks for `left`: greedily the most common, least loaded rank."""
    chosen = 0
    while left:
        _, ties = most(tuple(left))
        rank = min(ties, key=load_R.__getitem__)
        chosen |= 1 << rank
        left = [each for each in left if not each >> rank & 1]
    return chosen


@functools.lru_cache(maxsize=1 << 14)
def most(sets: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the most sets that share a rank, and the ranks for which that is reached."""
    ranks = members(functools.reduce(int.__or__, sets, 0))
    times = [sum(each >> rank & 1 for each in sets) for rank in ranks]
    found = max(times, default=0)
    return found, tuple(rank for rank, n in zip(ranks, times, strict=True) if n == found)


@functools.lru_cache(maxsize=1 << 14)
def members(ranks: int) -> tuple[int, ...]:
    """Return the ranks of a set."""
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
