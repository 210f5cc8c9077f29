"""Local search over a layer's slots: exchanges of two experts, and replacements of replicas.

All changes are priced together from the layout's sums. Without replicas the price is exact:

    exchange of i and j: enter[i, rank j] + enter[j, rank i] - leave[i] - leave[j]
                         + beside[i, j] + beside[j, i]     (tokens with both stay where they are)

With replicas it is an estimate: the best few changes are made, and reverted if they do not pay.

Shapes: S slots, E experts, R ranks.
"""

from collections.abc import Callable, Iterator

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.placement.layout import EMPTY, Layout, LayoutChange, totals
from planner.placement.routing import TokenCounts, rank_of_ids, shares
from planner.placement.slots import ranks_of

GAIN = 1e-9  # the least that counts
MAX_LAYOUTS = 8  # that are kept
MAX_STALE_ROUNDS = 40  # rounds without a gain
SLOTS_PER_EXCHANGE = 16  # random exchanges per round
TRIES = 4  # of the best changes, if prices are estimates


def descend(layout: Layout, most_changes: int) -> None:
    """Make the change that pays most until none does, or `most_changes` are made."""
    for _ in range(most_changes):
        exchanged = _best(layout, exchanges(layout), layout.exchange)
        replaced = layout.replicated and _best(layout, replacements(layout), layout.replace)
        if not exchanged and not replaced:
            return


def fill(layout: Layout) -> None:
    """Fill each empty slot in turn with the replica that pays most."""
    while (layout.experts_S == EMPTY).any():
        price_SE = replacements(layout)
        price_SE[layout.experts_S != EMPTY] = np.inf
        best: tuple[float, int, int] | None = None
        for slot, expert in _cheapest(price_SE, TRIES):
            undo = layout.replace(slot, expert)
            found = (layout.price(), slot, expert)
            best = found if best is None else min(best, found)
            layout.revert(undo)
        assert best is not None
        layout.replace(best[1], best[2])


def improved(layout: Layout, work: int, rng: np.random.Generator) -> list[Layout]:
    """Return the cheapest layouts found by an iterated local search from `layout`, ascending.

    Each round makes random exchanges, then descends, and continues from the result unless it costs
    more. Stops after `work`, or MAX_STALE_ROUNDS rounds without a gain. `layout` is not changed."""
    best = layout
    found = [layout]
    some = max(2, len(layout.ranks_S) // SLOTS_PER_EXCHANGE)
    spent, stale_rounds = 0, 0
    while spent < work and stale_rounds < MAX_STALE_ROUNDS:
        other = best.copy()
        other.work = 0
        for _ in range(some):
            possible = np.flatnonzero(np.isfinite(exchanges(other)))
            if not len(possible):
                return found
            other.exchange(*divmod(int(rng.choice(possible)), len(layout.ranks_S)))
        descend(other, 20 * len(layout.ranks_S))
        spent += other.work
        stale_rounds = 0 if other.price() < best.price() - GAIN else stale_rounds + 1
        if other.price() <= best.price():
            best = other
        found = _with(found, other)
    return found


def _with(found: list[Layout], other: Layout) -> list[Layout]:
    """Return the cheapest layouts, one per price."""
    if any(abs(each.price() - other.price()) < GAIN for each in found):
        return found
    return sorted([*found, other], key=Layout.price)[:MAX_LAYOUTS]


def _best(layout: Layout, prices: Floats, make: Callable[[int, int], LayoutChange]) -> bool:
    """Make the best change; return False if none pays."""
    now = layout.price()
    for i, j in _cheapest(prices, TRIES if layout.replicated else 1):
        if prices[i, j] >= now - GAIN:
            return False
        undo = make(i, j)
        if layout.price() < now - GAIN:
            return True
        layout.revert(undo)
    return False


def _cheapest(prices: Floats, count: int) -> list[tuple[int, int]]:
    """Return the indices of the lowest finite prices, ascending."""
    flat = prices.ravel()
    best = np.argpartition(flat, min(count, len(flat)) - 1)[:count]
    best = best[np.lexsort((best, flat[best]))]
    return [divmod(int(n), prices.shape[1]) for n in best if np.isfinite(flat[n])]


def exchanges(layout: Layout) -> Floats:
    """Return the price after each exchange [S, S], infinite where it is impossible."""
    sums, ranks_S, load_R = layout.sums, layout.ranks_S, layout.loads()
    change_SS = sums.enter_SR[:, ranks_S] - sums.leave_S[:, None] + sums.beside_SS
    copies_SS = sums.copies + change_SS + change_SS.T
    own_SS = load_R[ranks_S][:, None] - sums.pairs_S[:, None] + sums.pairs_S[None, :]
    others_SS = _most_of_others(load_R)[ranks_S][:, ranks_S]
    busiest_SS = np.maximum(np.maximum(own_SS, own_SS.T), others_SS)
    price_SS = layout.sample.objective.price(copies_SS, busiest_SS)
    barred_SS = ranks_S[:, None] == ranks_S[None, :]
    if layout.replicated:
        present_SS = (layout.slot_table() >= 0)[layout.experts_S][:, ranks_S]
        empty_S = layout.experts_S == EMPTY
        barred_SS |= present_SS | present_SS.T | empty_S[:, None] | empty_S
    if layout.homes is not None:
        moved_SR = ~layout.homes.held_ER[layout.experts_S]
        more_SS = moved_SR[:, ranks_S] - moved_SR[np.arange(len(ranks_S)), ranks_S, None].astype(
            int
        )
        moves_SS = layout.moves() + more_SS + more_SS.T
        price_SS += layout.homes.price * moves_SS
        barred_SS |= moves_SS > layout.homes.max_moves
    price_SS[barred_SS] = np.inf
    return price_SS


def replacements(layout: Layout) -> Floats:
    """Return the estimated price after each replacement of a slot's expert [S, E].

    Infinite where the slot has the only replica of its expert, or the rank has the new one already.
    """
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
        barred_SE |= moves_SE > layout.homes.max_moves
    price_SE[barred_SE] = np.inf
    return price_SE


def _busiest_replaced(layout: Layout, held_ER: Bools, load_R: Floats) -> Floats:
    """Return the estimated load of the busiest rank after each replacement [S, E].

    Of an expert's pairs, the new replica receives those that save a copy, or as many as level both
    ranks."""
    sums, ranks_S = layout.sums, layout.ranks_S
    served_ER = np.zeros(held_ER.shape)
    filled = np.flatnonzero(layout.experts_S != EMPTY)
    served_ER[layout.experts_S[filled], ranks_S[filled]] = sums.pairs_S[filled]
    source_E = served_ER.argmax(1)
    own_S = load_R[ranks_S] - sums.pairs_S
    even_SE = (load_R[source_E][None, :] - own_S[:, None]) / 2
    may_SE, join_SE = sums.may_ER.T[ranks_S], sums.join_ER.T[ranks_S]
    moved_SE = np.clip(even_SE, join_SE, np.maximum(may_SE, join_SE))
    others_SE = _most_of_others(load_R)[ranks_S][:, source_E]
    left_SE = load_R[source_E][None, :] - np.minimum(moved_SE, served_ER.max(1))
    busiest: Floats = np.maximum(np.maximum(own_S[:, None] + moved_SE, left_SE), others_SE)
    return busiest


def _most_of_others(load_R: Floats) -> Floats:
    """Return the load of the busiest rank except two [R, R]; 0 if there is no other."""
    R, each = len(load_R), np.arange(len(load_R))
    kept_RRR = np.broadcast_to(load_R, (R, R, R)).copy()
    kept_RRR[each, :, each] = 0.0
    kept_RRR[:, each, each] = 0.0
    most: Floats = kept_RRR.max(2)
    return most


RANDOM = 2  # random starts
ROUNDS = 12  # of co-clustering, after which labels hardly change


def balanced(load_E: Floats, homes_R: Ints) -> Ints:
    """Assign the experts by descending load, each to the least loaded rank with room."""
    ranks_E, load_R, room_R = np.zeros_like(load_E, np.int64), np.zeros(len(homes_R)), homes_R + 0
    for expert in np.argsort(-load_E, kind="stable"):
        rank = int(np.where(room_R > 0, load_R, np.inf).argmin())
        ranks_E[expert] = rank
        load_R[rank] += load_E[expert]
        room_R[rank] -= 1
    return ranks_E


def grown(together_EE: Floats, homes_R: Ints) -> Ints:
    """Fill each rank with the hottest expert left, then those that co-occur most for their load."""
    E = len(together_EE)
    load_E = np.maximum(1.0, together_EE.diagonal())
    ranks_E = np.full(E, -1)
    for rank, room in enumerate(homes_R):
        tied_E = np.zeros(E)
        for n in range(room):
            score_E = tied_E / load_E if n else load_E
            chosen = int(np.where(ranks_E < 0, score_E, -np.inf).argmax())
            ranks_E[chosen] = rank
            tied_E = tied_E + together_EE[chosen]
    return ranks_E


def co_clustered(counts: TokenCounts, ranks_E: Ints, homes_R: Ints) -> Ints:
    """Return ranks after moving ids to most of their experts and back, starting at `ranks_E`."""
    R, E = len(homes_R), len(ranks_E)
    ids_N = np.unique(counts.ids_N, return_inverse=True)[1]
    for _ in range(ROUNDS):
        holds_ER = ranks_E[:, None] == np.arange(R)
        label_V = rank_of_ids(shares(ids_N, counts.experts_N, counts.times_N, holds_ER))
        at_N = counts.experts_N * R + label_V[ids_N]
        seen_ER = totals(at_N, counts.times_N, E * R).reshape(E, R)
        found_E = _divided(seen_ER, homes_R)
        if (found_E == ranks_E).all():
            break
        ranks_E = found_E
    return ranks_E


def _divided(score_ER: Floats, homes_R: Ints) -> Ints:
    """Return the ranks [E] with a high sum of scores: greedy by regret, then exchanges."""
    E, room_R = len(score_ER), homes_R + 0
    ranks_E = np.full(E, -1)
    best_E2 = np.sort(score_ER, axis=1)[:, -2:]
    for expert in np.argsort(best_E2[:, 0] - best_E2[:, -1], kind="stable"):
        rank = int(np.where(room_R > 0, score_ER[expert], -np.inf).argmax())
        ranks_E[expert] = rank
        room_R[rank] -= 1
    for _ in range(4 * E):
        gain_EE = score_ER[:, ranks_E] - score_ER[np.arange(E), ranks_E][:, None]
        gain_EE = gain_EE + gain_EE.T
        i, j = divmod(int(gain_EE.argmax()), E)
        if gain_EE[i, j] <= 0:
            break
        ranks_E[[i, j]] = ranks_E[[j, i]]
    return ranks_E


def starts(
    counts: TokenCounts, together_EE: Floats, homes_R: Ints, rng: np.random.Generator
) -> Iterator[Ints]:
    """Yield the ranks [E] of each initial layout."""
    in_order_E = ranks_of(homes_R)
    yield in_order_E
    yield balanced(together_EE.diagonal(), homes_R)
    yield (packed := grown(together_EE, homes_R))
    if len(counts.ids_N):
        yield co_clustered(counts, packed, homes_R)
    for _ in range(RANDOM):
        yield rng.permutation(in_order_E)
