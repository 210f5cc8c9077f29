"""What a search looks at to price every change of a layer's slots at once: sums over tokens, kept
up to date for those that a change concerns.

    leave_S      copies that fewer were sent if the slot's pairs were served by no rank
    enter_SR     copies that more were sent if they were served by that rank
    beside_SS    of leave_S, what comes from tokens that have a pair in the other slot too
    give_S       copies that more were sent (fewer: negative) if other replicas served its pairs
    join_ER      copies that fewer were sent if the rank got that expert; each is a pair that moves
    may_ER       pairs that the rank could then serve with no copy more

Shapes: M tokens, K experts of each, S slots, E experts, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def totals(which: Ints, values: NDArray[np.generic], count: int) -> Floats:
    """[count] sums of the values that fall to each number."""
    return np.bincount(which.ravel(), values.ravel(), count).astype(np.float64, copy=False)


class Sums(NamedTuple):
    """pairs_S: served by each slot. The last three are empty where there are no replicas."""

    copies: Floats
    pairs_S: Floats
    leave_S: Floats
    enter_SR: Floats
    beside_SS: Floats
    give_S: Floats
    join_ER: Floats
    may_ER: Floats

    def changed(self, before: Sums, after: Sums) -> Sums:
        """With the sums over some tokens in the place of what they were."""
        pairs = zip(self, before, after, strict=True)
        return Sums(*(whole - old + new for whole, old, new in pairs))


class _Tokens(NamedTuple):
    """here_MR: ranks that a token goes to. alone_MK: the weight of a token, where the pair is the
    only one that its rank serves."""

    slots_MK: Ints
    weights_M: Floats
    ranks_MK: Ints
    here_MR: Bools
    alone_MK: Floats


def sums_of(slots_MK: Ints, weights_M: Floats, ranks_S: Ints, ranks: int) -> Sums:
    """Of tokens whose pairs those slots serve, without what replicas ask."""
    tokens = _tokens(slots_MK, weights_M, ranks_S, ranks)
    K, S = slots_MK.shape[1], len(ranks_S)
    new_MR = ~tokens.here_MR * weights_M[:, None]
    both_MKK = slots_MK[:, :, None] * S + slots_MK[:, None, :]
    none = np.zeros(0)
    return Sums(
        weights_M @ tokens.here_MR.sum(1),
        totals(slots_MK, np.repeat(weights_M, K), S),
        totals(slots_MK, tokens.alone_MK, S),
        _by_rank(slots_MK, np.broadcast_to(new_MR[:, None, :], (*slots_MK.shape, ranks)), S),
        totals(both_MKK, np.repeat(tokens.alone_MK, K), S * S).reshape(S, S),
        none,
        none,
        none,
    )


def with_replicas(
    sums: Sums, sets_MK: Ints, slots_MK: Ints, weights_M: Floats, ranks_S: Ints, holds_ER: Bools
) -> Sums:
    """`sums` of those tokens, and what replicas ask."""
    E, R = holds_ER.shape
    tokens = _tokens(slots_MK, weights_M, ranks_S, R)
    other_MKR = np.broadcast_to(tokens.here_MR[:, None, :], (*slots_MK.shape, R)).copy()
    np.put_along_axis(other_MKR, tokens.ranks_MK[:, :, None], False, axis=2)
    alone_MKR = tokens.alone_MK[:, :, None]
    weight_MK = np.repeat(weights_M, slots_MK.shape[1]).reshape(slots_MK.shape)
    joined_MKR = alone_MKR * other_MKR
    free_MKR = np.where(other_MKR, weight_MK[:, :, None], alone_MKR)
    near_MK = (holds_ER[sets_MK] & other_MKR).any(2)
    given_MK = np.where(near_MK, -tokens.alone_MK, weight_MK - tokens.alone_MK)
    return sums._replace(
        give_S=totals(slots_MK, given_MK, len(ranks_S)),
        join_ER=_by_rank(sets_MK, joined_MKR, E),
        may_ER=_by_rank(sets_MK, free_MKR, E),
    )


def _tokens(slots_MK: Ints, weights_M: Floats, ranks_S: Ints, ranks: int) -> _Tokens:
    rows_M = np.arange(len(slots_MK))
    ranks_MK = ranks_S[slots_MK]
    counts_MR = np.zeros((len(slots_MK), ranks), np.int64)
    for ranks_M in ranks_MK.T:
        counts_MR[rows_M, ranks_M] += 1
    alone_MK = (counts_MR[rows_M[:, None], ranks_MK] == 1) * weights_M[:, None]
    return _Tokens(slots_MK, weights_M, ranks_MK, counts_MR > 0, alone_MK)


def _by_rank(which_MK: Ints, values_MKR: NDArray[np.generic], count: int) -> Floats:
    """[count, R] sums of the values by slot or expert, and rank."""
    R = values_MKR.shape[2]
    at_MKR = which_MK[:, :, None] * R + np.arange(R)
    return totals(at_MKR, values_MKR, count * R).reshape(count, R)
