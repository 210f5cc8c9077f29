"""Changes of a layer's slots, one at a time, while they make the layer cheaper: two slots exchange
their experts, or a replica makes room for another.

Every change is priced at once from the layout's sums. Without replicas that is exact:

    exchange of i and j: enter[i, rank j] + enter[j, rank i] - leave[i] - leave[j]
                         + beside[i, j] + beside[j, i]     (tokens with both stay where they are)

With them it is an estimate: the best few are made, and stay only if they pay.

Shapes: S slots, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.placement.layout import EMPTY, Layout, Undo
from planner.placement.sums import Bools, Floats

GAIN = 1e-9  # less is none
KEPT = 8  # of the layouts that were found
IN_VAIN = 40  # rounds without a gain
SHAKEN = 16  # one slot in so many is exchanged at random
TRIES = 4  # of the best changes, where prices are estimates


def descend(layout: Layout, most_changes: int) -> None:
    """Makes the change that pays most until none does, or so many were made."""
    for _ in range(most_changes):
        exchanged = _best(layout, exchanges(layout), layout.exchange)
        replaced = layout.replicated and _best(layout, replacements(layout), layout.replace)
        if not exchanged and not replaced:
            return


def fill(layout: Layout) -> None:
    """Gives empty slots the replicas that pay most, one after the other."""
    while (layout.experts_S == EMPTY).any():
        price_SE = replacements(layout)
        price_SE[layout.experts_S != EMPTY] = np.inf
        best: tuple[float, int, int] | None = None
        for slot, expert in _cheapest(price_SE, TRIES):
            undo = layout.replace(slot, expert)
            found = (layout.price(), slot, expert)
            best = found if best is None else min(best, found)
            layout.take_back(undo)
        assert best is not None
        layout.replace(best[1], best[2])


def improved(layout: Layout, work: int, rng: np.random.Generator) -> list[Layout]:
    """The cheapest of what is found from `layout` on, ascending: some exchanges at random, then
    `descend`, and on from there if that is no dearer. Until so much work is done, or was long in
    vain; `layout` stays as it is."""
    best = layout
    found = [layout]
    some = max(2, len(layout.ranks_S) // SHAKEN)
    spent, in_vain = 0, 0
    while spent < work and in_vain < IN_VAIN:
        other = best.copy()
        other.work = 0
        for _ in range(some):
            possible = np.flatnonzero(np.isfinite(exchanges(other)))
            if not len(possible):
                return found
            other.exchange(*divmod(int(rng.choice(possible)), len(layout.ranks_S)))
        descend(other, 20 * len(layout.ranks_S))
        spent += other.work
        in_vain = 0 if other.price() < best.price() - GAIN else in_vain + 1
        if other.price() <= best.price():
            best = other
        found = _with(found, other)
    return found


def _with(found: list[Layout], other: Layout) -> list[Layout]:
    """The cheapest of them, each price once."""
    if any(abs(each.price() - other.price()) < GAIN for each in found):
        return found
    return sorted([*found, other], key=Layout.price)[:KEPT]


def _best(layout: Layout, prices: Floats, make: Callable[[int, int], Undo]) -> bool:
    """Whether one of the changes was made."""
    now = layout.price()
    for i, j in _cheapest(prices, TRIES if layout.replicated else 1):
        if prices[i, j] >= now - GAIN:
            return False
        undo = make(i, j)
        if layout.price() < now - GAIN:
            return True
        layout.take_back(undo)
    return False


def _cheapest(prices: Floats, count: int) -> list[tuple[int, int]]:
    """Indices of the least finite prices, ascending."""
    flat = prices.ravel()
    best = np.argpartition(flat, min(count, len(flat)) - 1)[:count]
    best = best[np.lexsort((best, flat[best]))]
    return [divmod(int(n), prices.shape[1]) for n in best if np.isfinite(flat[n])]


def exchanges(layout: Layout) -> Floats:
    """[S, S] the price after each exchange, infinite where there is none to make."""
    sums, ranks_S, load_R = layout.sums, layout.ranks_S, layout.loads()
    change_SS = sums.enter_SR[:, ranks_S] - sums.leave_S[:, None] + sums.beside_SS
    copies_SS = sums.copies + change_SS + change_SS.T
    mine_SS = load_R[ranks_S][:, None] - sums.pairs_S[:, None] + sums.pairs_S[None, :]
    others_SS = _most_of_others(load_R)[ranks_S][:, ranks_S]
    busiest_SS = np.maximum(np.maximum(mine_SS, mine_SS.T), others_SS)
    price_SS = layout.sample.objective.price(copies_SS, busiest_SS)
    barred_SS = ranks_S[:, None] == ranks_S[None, :]
    if layout.replicated:
        there_SS = (layout.slot_table() >= 0)[layout.experts_S][:, ranks_S]
        empty_S = layout.experts_S == EMPTY
        barred_SS |= there_SS | there_SS.T | empty_S[:, None] | empty_S
    if layout.homes is not None:
        moved_SR = ~layout.homes.held_ER[layout.experts_S]
        more_SS = moved_SR[:, ranks_S] - moved_SR[np.arange(len(ranks_S)), ranks_S, None].astype(
            int
        )
        moves_SS = layout.moves() + more_SS + more_SS.T
        price_SS += layout.homes.price * moves_SS
        barred_SS |= moves_SS > layout.homes.most_moves
    price_SS[barred_SS] = np.inf
    return price_SS


def replacements(layout: Layout) -> Floats:
    """[S, E] about the price once the slot has that expert, infinite where it cannot: its own is
    nowhere else, or the rank has the other."""
    sums, ranks_S, experts_S = layout.sums, layout.ranks_S, layout.experts_S
    held_ER, load_R = layout.slot_table() >= 0, layout.loads()
    copies_SE = sums.copies + sums.give_S[:, None] - sums.join_ER.T[ranks_S]
    busiest_SE = _busiest_replaced(layout, held_ER, load_R)
    price_SE = layout.sample.objective.price(copies_SE, busiest_SE)
    single_S = (experts_S != EMPTY) & (held_ER.sum(1)[experts_S] == 1)
    barred_SE = single_S[:, None] | held_ER.T[ranks_S]
    if layout.homes is not None:
        moved_SE = ~layout.homes.held_ER.T[ranks_S]
        now_S = (experts_S != EMPTY) & moved_SE[np.arange(len(ranks_S)), experts_S]
        moves_SE = layout.moves() + moved_SE.astype(int) - now_S[:, None]
        price_SE += layout.homes.price * moves_SE
        barred_SE |= moves_SE > layout.homes.most_moves
    price_SE[barred_SE] = np.inf
    return price_SE


def _busiest_replaced(layout: Layout, held_ER: Bools, load_R: Floats) -> Floats:
    """[S, E] about the load of the busiest rank: of an expert's pairs, those move to its new rank
    that save a copy, or as many as even out the two ranks."""
    sums, ranks_S = layout.sums, layout.ranks_S
    served_ER = np.zeros(held_ER.shape)
    filled = np.flatnonzero(layout.experts_S != EMPTY)
    served_ER[layout.experts_S[filled], ranks_S[filled]] = sums.pairs_S[filled]
    source_E = served_ER.argmax(1)
    mine_S = load_R[ranks_S] - sums.pairs_S
    even_SE = (load_R[source_E][None, :] - mine_S[:, None]) / 2
    may_SE, join_SE = sums.may_ER.T[ranks_S], sums.join_ER.T[ranks_S]
    moved_SE = np.clip(even_SE, join_SE, np.maximum(may_SE, join_SE))
    others_SE = _most_of_others(load_R)[ranks_S][:, source_E]
    left_SE = load_R[source_E][None, :] - np.minimum(moved_SE, served_ER.max(1))
    busiest: Floats = np.maximum(np.maximum(mine_S[:, None] + moved_SE, left_SE), others_SE)
    return busiest


def _most_of_others(load_R: Floats) -> Floats:
    """[R, R] the load of the busiest rank but those two; 0 where there is no other."""
    R, each = len(load_R), np.arange(len(load_R))
    kept_RRR = np.broadcast_to(load_R, (R, R, R)).copy()
    kept_RRR[each, :, each] = 0.0
    kept_RRR[:, each, each] = 0.0
    most: Floats = kept_RRR.max(2)
    return most
