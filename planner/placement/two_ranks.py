"""Which replica answers, where there are two ranks: the rule of `replicas.py` in half the calls.

A token whose experts are all on both ranks goes to either; of any other it is settled, and only its
pairs that both ranks could answer level them.
Shapes: T tokens, K experts of each, E experts, R = 2 ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]

_FIRST, _OTHER, _BOTH = 1, 2, 3


class TwoRankChooser:
    """The rank of each expert of a layer, and the choice where both have it."""

    def __init__(self, slot_ER: NDArray[Any]) -> None:
        """slot_ER: -1 where the rank does not have the expert."""
        has_ER = slot_ER >= 0
        self._ranks_E = (has_ER * np.array([_FIRST, _OTHER])).sum(axis=1).astype(np.uint8)
        self._only_E = np.where(self._ranks_E == _BOTH, 0, self._ranks_E).astype(np.uint8)
        self._slot_N = slot_ER.T.ravel()
        self._offsets = np.array([0, 0, len(slot_ER), len(slot_ER)])  # what is of both: the other's

    def slots(self, topk_ids_TK: Array, free_rank: int | None = None) -> NDArray[Any]:
        """[T, K] slot of each pair. free_rank: one that costs a token nothing."""
        ids_KT = np.ascontiguousarray(topk_ids_TK.T)
        chosen_T = np.bitwise_or.reduce(self._only_E.take(ids_KT), axis=0)
        if free_rank is not None:
            chosen_T |= np.uint8(1 << free_rank)
        ranks_KT = self._ranks_E.take(ids_KT)
        ranks_KT &= chosen_T
        ranks = ranks_KT.tobytes()
        first, other = ranks.count(_FIRST), ranks.count(_OTHER)
        if first + other < len(ranks):
            tokens_U = (chosen_T == 0).nonzero()[0]
            if tokens_U.size:
                items, pairs = tokens_U.size, len(ids_KT)
                share = _share(items, pairs, first, other)
                ranks_KT[:, tokens_U] = _spread(items, share)
                first += share * pairs
                other += (items - share) * pairs
            ranks_N = ranks_KT.ravel()
            pairs_N = (ranks_N == _BOTH).nonzero()[0]
            if pairs_N.size:
                ranks_N[pairs_N[: _share(pairs_N.size, 1, first, other)]] = _FIRST
        at_TK = self._offsets.take(ranks_KT.T)
        at_TK += topk_ids_TK
        slot_TK: NDArray[Any] = self._slot_N.take(at_TK)
        return slot_TK


def _share(items: int, pairs: int, first: int, other: int) -> int:
    """How many of the items, of that many pairs each, the first rank gets, to be level."""
    share = (items * pairs + other - first + pairs) // (2 * pairs)
    return 0 if share < 0 else items if share > items else share


@functools.lru_cache(maxsize=256)
def _spread(items: int, some: int) -> NDArray[np.uint8]:
    """[items] rank of each: so many are the first one's, evenly. Not to be written to."""
    upto_U = np.arange(1, items + 1) * some // items
    return np.where(np.diff(upto_U, prepend=0), _FIRST, _OTHER).astype(np.uint8)
