"""Mutable slots of one layer during a placement search, with the sums that price further changes.

Shapes: M distinct tokens, each with a weight, K experts of each, S slots, E experts, R ranks.

The cost of a placement for one layer is the time of its busiest rank or of its link, whichever is
longer (docs/notation.md, "Placement"). The shorter of the two is hidden except for filling and
draining the pipeline. `load_limit` protects texts outside of the sample, where one late rank delays
the whole group.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np

from planner.arrays import Array, Bools, Floats, Ints
from planner.placement.slots import replica_chooser

HIDDEN = 0.1  # weight of the hidden time
OVERLOAD = 2.0  # a load of 0.01 over the limit costs as much as 2 % more copies
LOAD_LIMIT = 1.1


class PlacementCosts(NamedTuple):
    """Costs in any one unit of time.

    pair: one (token, expert) pair at an expert rank. copy: one token's copy, over all links
    together. move: fraction (0..1) of a layer's time that a moved expert has to save."""

    pair: float
    copy: float
    load_limit: float = LOAD_LIMIT
    move: float = 0.001


def usual_costs(top_k: int, ranks: int) -> PlacementCosts:
    """Return costs by which balanced ranks compute for as long as one copy of each token takes."""
    return PlacementCosts(pair=ranks / top_k, copy=1.0)


class Objective(NamedTuple):
    """Costs of a sample of `tokens` tokens with `pairs` pairs on `ranks` ranks."""

    costs: PlacementCosts
    tokens: float
    pairs: float
    ranks: int

    def price(self, copies: Floats | float, busiest: Floats | float) -> Floats:
        """Return the cost for each; busiest: pairs of the busiest rank."""
        link = np.asarray(copies) * (self.costs.copy / self.tokens)
        compute = np.asarray(busiest) * (self.costs.pair / self.tokens)
        price = np.maximum(link, compute) + HIDDEN * np.minimum(link, compute)
        if math.isfinite(self.costs.load_limit):
            load = np.asarray(busiest) * (self.ranks / self.pairs)
            price = price + OVERLOAD * link * np.maximum(0.0, load - self.costs.load_limit)
        return np.asarray(price)


EMPTY = -1  # expert of an unfilled slot


class WeightedSets(NamedTuple):
    """Sampled expert sets. rows_E: the tokens of each expert."""

    sets_MK: Ints
    weights_M: Floats
    rows_E: tuple[Ints, ...]
    objective: Objective

    @property
    def experts(self) -> int:
        return len(self.rows_E)


class HomeRanks(NamedTuple):
    """Ranks that hold the experts at the start, the price of a move, and the maximum of moves."""

    held_ER: Bools
    price: float
    max_moves: int


class LayoutChange(NamedTuple):
    """State before a change, for `Layout.revert`."""

    slots: Ints
    experts: Ints
    ranks: Ints
    rows: Ints
    slots_MK: Ints
    sums: Sums


CHANGE_WORK = 20_000  # fixed cost of a change


class Layout:
    """Experts and ranks of the slots, changed in place.

    work: cost of the changes so far in processed numbers, a measure of time that is equal on every
    machine."""

    def __init__(
        self, sample: WeightedSets, experts_S: Ints, ranks_S: Ints, homes: HomeRanks | None = None
    ) -> None:
        self.sample, self.homes = sample, homes
        self.experts_S, self.ranks_S = experts_S.copy(), ranks_S.copy()
        self.ranks = sample.objective.ranks
        self.replicated = len(experts_S) > sample.experts
        self.slots_MK = np.zeros_like(sample.sets_MK)
        self.work = 0
        everything = np.arange(len(sample.sets_MK))
        self._serve(everything, np.zeros(self.ranks))
        self.sums = self._sums(everything)

    def copy(self) -> Layout:
        other = copy.copy(self)
        for name in ("experts_S", "ranks_S", "slots_MK"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def slot_table(self) -> Ints:
        """Return the slot of each expert on each rank [E, R], or -1."""
        table_ER = np.full((self.sample.experts, self.ranks), -1)
        filled = np.flatnonzero(self.experts_S != EMPTY)
        table_ER[self.experts_S[filled], self.ranks_S[filled]] = filled
        return table_ER

    def loads(self) -> Floats:
        """Return the pairs of each rank [R]."""
        return totals(self.ranks_S, self.sums.pairs_S, self.ranks)

    def moves(self) -> int:
        """Return the number of experts on ranks that did not have them."""
        if self.homes is None:
            return 0
        filled = self.experts_S != EMPTY
        return int((filled & ~self.homes.held_ER[self.experts_S, self.ranks_S]).sum())

    def price(self) -> float:
        price = float(self.sample.objective.price(self.sums.copies, self.loads().max()))
        return price + (self.homes.price * self.moves() if self.homes else 0.0)

    def change(self, slots: Ints, experts: Ints, ranks: Ints) -> LayoutChange:
        """Assign experts and ranks to slots, and serve all tokens anew that this concerns."""
        rows = self._rows(np.concatenate([self.experts_S[slots], experts]))
        undo = LayoutChange(
            slots, self.experts_S[slots], self.ranks_S[slots], rows, self.slots_MK[rows], self.sums
        )
        K, S = self.slots_MK.shape[1], len(self.ranks_S)
        passes = 6 if self.replicated else 2  # over the tokens
        self.work += CHANGE_WORK + 8 * S * S + passes * len(rows) * K * (K + self.ranks)
        before = self._sums(rows)
        beside_R = self.loads() - totals(self.ranks_S, before.pairs_S, self.ranks)
        self.experts_S[slots], self.ranks_S[slots] = experts, ranks
        if self.replicated:
            self._serve(rows, beside_R)
        self.sums = self.sums.changed(before, self._sums(rows))
        return undo

    def exchange(self, i: int, j: int) -> LayoutChange:
        slots = np.array([i, j])
        return self.change(slots, self.experts_S[slots], self.ranks_S[slots[::-1]])

    def replace(self, slot: int, expert: int) -> LayoutChange:
        slots = np.array([slot])
        return self.change(slots, np.array([expert]), self.ranks_S[slots])

    def revert(self, undo: LayoutChange) -> None:
        self.experts_S[undo.slots], self.ranks_S[undo.slots] = undo.experts, undo.ranks
        self.slots_MK[undo.rows] = undo.slots_MK
        self.sums = undo.sums

    def _rows(self, experts: Ints) -> Ints:
        """Return the tokens of any of the experts."""
        marked = np.zeros(len(self.sample.sets_MK), bool)
        for expert in set(experts.tolist()) - {EMPTY}:
            marked[self.sample.rows_E[expert]] = True
        return np.flatnonzero(marked)

    def _serve(self, rows: Ints, beside_R: Floats) -> None:
        """Choose the slots of these tokens' pairs. beside_R: loads without them."""
        sets_MK, weights_M = self.sample.sets_MK[rows], self.sample.weights_M[rows]
        chooser = replica_chooser(self.slot_table())
        self.slots_MK[rows] = chooser.slots(sets_MK, None, weights_M, beside_R)

    def _sums(self, rows: Ints) -> Sums:
        slots_MK, weights_M = self.slots_MK[rows], self.sample.weights_M[rows]
        tokens = _tokens(slots_MK, weights_M, self.ranks_S, self.ranks)
        sums = _sums_of(tokens, len(self.ranks_S))
        if not self.replicated:
            return sums
        return _with_replicas(sums, tokens, self.sample.sets_MK[rows], self.slot_table() >= 0)


def totals(which: Ints, values: Array, count: int) -> Floats:
    """Return the sum of the values per index [count]."""
    return np.bincount(which.ravel(), values.ravel(), count).astype(np.float64, copy=False)


class Sums(NamedTuple):
    """Sums over the sample; pairs_S: of each slot. The last three are empty without replicas."""

    copies: Floats
    pairs_S: Floats
    leave_S: Floats
    enter_SR: Floats
    beside_SS: Floats
    give_S: Floats
    join_ER: Floats
    may_ER: Floats

    def changed(self, before: Sums, after: Sums) -> Sums:
        """Return the sums with those of some tokens replaced."""
        pairs = zip(self, before, after, strict=True)
        return Sums(*(whole - old + new for whole, old, new in pairs))


class _Tokens(NamedTuple):
    """Ranks of each pair.

    here_MR: ranks that serve a token. alone_MK: the token's weight where no other pair shares the
    rank."""

    slots_MK: Ints
    weights_M: Floats
    ranks_MK: Ints
    here_MR: Bools
    alone_MK: Floats


def _sums_of(tokens: _Tokens, S: int) -> Sums:
    """Return the sums of tokens, without those for replicas."""
    slots_MK, weights_M = tokens.slots_MK, tokens.weights_M
    K, ranks = slots_MK.shape[1], tokens.here_MR.shape[1]
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


def _with_replicas(sums: Sums, tokens: _Tokens, sets_MK: Ints, holds_ER: Bools) -> Sums:
    """Return `sums` with those for replicas."""
    (E, R), slots_MK = holds_ER.shape, tokens.slots_MK
    other_MKR = np.broadcast_to(tokens.here_MR[:, None, :], (*slots_MK.shape, R)).copy()
    np.put_along_axis(other_MKR, tokens.ranks_MK[:, :, None], False, axis=2)
    alone_MKR = tokens.alone_MK[:, :, None]
    weight_MK = np.repeat(tokens.weights_M, slots_MK.shape[1]).reshape(slots_MK.shape)
    joined_MKR = alone_MKR * other_MKR
    free_MKR = np.where(other_MKR, weight_MK[:, :, None], alone_MKR)
    near_MK = (holds_ER[sets_MK] & other_MKR).any(2)
    given_MK = np.where(near_MK, -tokens.alone_MK, weight_MK - tokens.alone_MK)
    return sums._replace(
        give_S=totals(slots_MK, given_MK, len(sums.pairs_S)),
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


def _by_rank(which_MK: Ints, values_MKR: Array, count: int) -> Floats:
    """Return the sum of the values per index and rank [count, R]."""
    R = values_MKR.shape[2]
    at_MKR = which_MK[:, :, None] * R + np.arange(R)
    return totals(at_MKR, values_MKR, count * R).reshape(count, R)
