"""A layer's slots while a search changes them: their experts and ranks, which slot serves each
pair of the sample, and the sums that price further changes.

Shapes: M tokens (equal sets are one, with a weight), K experts of each, S slots, E experts, R
ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.placement.objective import Objective
from planner.placement.serving import serving_ranks
from planner.placement.sums import Bools, Floats, Ints, Sums, sums_of, totals, with_replicas

EMPTY = -1  # in the place of an expert: a slot that is still to be filled


class Sample(NamedTuple):
    """rows_E: of each expert, the tokens that go to it."""

    sets_MK: Ints
    weights_M: Floats
    rows_E: tuple[Ints, ...]
    objective: Objective

    @property
    def experts(self) -> int:
        return len(self.rows_E)


class Homes(NamedTuple):
    """Ranks that had experts before; what one that moves has to save; and how many may."""

    held_ER: Bools
    price: float
    most_moves: int


class Undo(NamedTuple):
    """What a change took the place of."""

    slots: Ints
    experts: Ints
    ranks: Ints
    rows: Ints
    slots_MK: Ints
    sums: Sums


CHANGE_WORK = 20_000  # what every change costs beside, however few tokens it concerns


class Layout:
    """Changed in place. work: what changes have cost, in numbers looked at, about: a measure of
    time that is the same on every machine."""

    def __init__(
        self, sample: Sample, experts_S: Ints, ranks_S: Ints, homes: Homes | None = None
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
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__)
        for name in ("experts_S", "ranks_S", "slots_MK"):
            setattr(other, name, getattr(self, name).copy())
        return other

    # ---- what it is

    def slot_table(self) -> Ints:
        """[E, R] the slot of the expert on that rank, or -1."""
        table_ER = np.full((self.sample.experts, self.ranks), -1)
        filled = np.flatnonzero(self.experts_S != EMPTY)
        table_ER[self.experts_S[filled], self.ranks_S[filled]] = filled
        return table_ER

    def loads(self) -> Floats:
        """[R] pairs of each rank."""
        return totals(self.ranks_S, self.sums.pairs_S, self.ranks)

    def moves(self) -> int:
        """Experts on ranks that did not have them."""
        if self.homes is None:
            return 0
        filled = self.experts_S != EMPTY
        return int((filled & ~self.homes.held_ER[self.experts_S, self.ranks_S]).sum())

    def price(self) -> float:
        price = float(self.sample.objective.price(self.sums.copies, self.loads().max()))
        return price + (self.homes.price * self.moves() if self.homes else 0.0)

    # ---- changes

    def change(self, slots: Ints, experts: Ints, ranks: Ints) -> Undo:
        """Those slots get those experts and ranks; what they served, and may serve, is served
        anew."""
        rows = self._rows(np.concatenate([self.experts_S[slots], experts]))
        undo = Undo(
            slots,
            self.experts_S[slots],
            self.ranks_S[slots],
            rows,
            self.slots_MK[rows],
            self.sums,
        )
        K, S = self.slots_MK.shape[1], len(self.ranks_S)
        passes = 6 if self.replicated else 2  # over the tokens: with replicas, served anew as well
        self.work += CHANGE_WORK + 8 * S * S + passes * len(rows) * K * (K + self.ranks)
        before = self._sums(rows)
        beside_R = self.loads() - totals(self.ranks_S, before.pairs_S, self.ranks)
        self.experts_S[slots], self.ranks_S[slots] = experts, ranks
        if self.replicated:
            self._serve(rows, beside_R)
        self.sums = self.sums.changed(before, self._sums(rows))
        return undo

    def exchange(self, i: int, j: int) -> Undo:
        slots = np.array([i, j])
        return self.change(slots, self.experts_S[slots], self.ranks_S[slots[::-1]])

    def replace(self, slot: int, expert: int) -> Undo:
        slots = np.array([slot])
        return self.change(slots, np.array([expert]), self.ranks_S[slots])

    def take_back(self, undo: Undo) -> None:
        self.experts_S[undo.slots], self.ranks_S[undo.slots] = undo.experts, undo.ranks
        self.slots_MK[undo.rows] = undo.slots_MK
        self.sums = undo.sums

    # ---- the sample

    def _rows(self, experts: Ints) -> Ints:
        """Tokens that go to any of them."""
        marked = np.zeros(len(self.sample.sets_MK), bool)
        for expert in set(experts.tolist()) - {EMPTY}:
            marked[self.sample.rows_E[expert]] = True
        return np.flatnonzero(marked)

    def _serve(self, rows: Ints, beside_R: Floats) -> None:
        """Chooses the slots of those tokens' pairs. beside_R: loads without them."""
        table_ER = self.slot_table()
        sets_MK = self.sample.sets_MK[rows]
        ranks_MK = serving_ranks(sets_MK, self.sample.weights_M[rows], table_ER >= 0, beside_R)
        self.slots_MK[rows] = table_ER[sets_MK, ranks_MK]

    def _sums(self, rows: Ints) -> Sums:
        slots_MK, weights_M = self.slots_MK[rows], self.sample.weights_M[rows]
        sums = sums_of(slots_MK, weights_M, self.ranks_S, self.ranks)
        if not self.replicated:
            return sums
        sets_MK, holds_ER = self.sample.sets_MK[rows], self.slot_table() >= 0
        return with_replicas(sums, sets_MK, slots_MK, weights_M, self.ranks_S, holds_ER)
