"""Placement of a layer's experts that minimises its time on a sample (`Objective`).

Several starts (in order, balanced, grown from co-occurrence, co-clustered with token ids, random)
are improved by exchanges; the best receive replicas in their spare slots and are improved again. A
part of the sample is held out: a result that is no better there than the present placement, or
experts in order, is discarded.
"""

from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats, Ints
from planner.placement.layout import (
    EMPTY,
    LOAD_LIMIT,
    HomeRanks,
    Layout,
    Objective,
    PlacementCosts,
    WeightedSets,
    totals,
    usual_costs,
)
from planner.placement.routing import LayerRouting, TokenCounts, line_price, local_share, measure
from planner.placement.search import descend, fill, improved, starts
from planner.placement.slots import (
    Line,
    check_slots,
    contiguous_line,
    first_homes,
    held,
    layer_slots,
    line_of,
    moved,
    ranks_of,
)

WORK = 100_000_000  # of the search, about two seconds; a fourth of it with replicas
REBALANCE_WORK = WORK // 20  # of a search from the present placement
BEST = 2  # starts that are searched from
NEARLY = 0.9  # of the overload of experts in order is allowed
MANY = 8  # experts per rank from which on levelling costs few copies: overload at most
FINE = 0.6  # of a mean expert's share of the rank
LOCAL = 0.2  # discount of a layer's price if all pairs are on the rank of their token id


def solve_layer(
    routing: LayerRouting,
    slots_per_rank: Sequence[int],
    *,
    costs: PlacementCosts | None = None,
    start: Sequence[int] | None = None,
    max_moves: int | None = None,
    work: int = WORK,
    seed: int = 0,
) -> Line:
    """Return the expert of each slot, rank after rank, of the best placement found.

    Equal arguments give equal results. costs: default: `usual_costs`. start: present expert of each
    slot, from which the search begins; a moved expert has to save `costs.move`, and at most
    `max_moves` move. work: limit of a search from other starts. Raises ConfigError if slots do not
    fit."""
    check_slots(routing.num_experts, slots_per_rank)
    ranks, top_k = len(slots_per_rank), routing.sets_PK.shape[1]
    fitted, kept = split(routing)
    before = contiguous_line(fitted.load(), slots_per_rank) if start is None else tuple(start)
    if costs is None:
        costs = usual_costs(top_k, ranks)
        if start is None:
            over = measure(fitted, layer_slots(before, slots_per_rank)).load - 1
            costs = costs._replace(load_limit=_limit(over, routing.num_experts / ranks))
    line = before
    if ranks > 1 and len(kept.sets_PK):
        sample = sample_of(fitted, costs, ranks)
        if start is None:
            layout = _from_scratch(fitted, sample, slots_per_rank, work, seed)
        else:
            layout = _from_start(sample, slots_per_rank, before, max_moves)
        line = line_of(
            layout.experts_S, layout.ranks_S, slots_per_rank, () if start is None else before
        )
    return _select_better(kept, slots_per_rank, costs, before, line, following=start is not None)


def _limit(over_in_order: float, experts_per_rank: float) -> float:
    """Return the load limit without known costs. Held-out texts load ranks less evenly."""
    over = max(LOAD_LIMIT - 1, NEARLY * over_in_order)
    if experts_per_rank >= MANY:
        over = min(over, FINE / experts_per_rank)
    return 1 + over


def _from_scratch(
    routing: LayerRouting, sample: WeightedSets, slots_per_rank: Sequence[int], work: int, seed: int
) -> Layout:
    E, homes_R = sample.experts, first_homes(sample.experts, slots_per_rank)
    rng = np.random.default_rng(seed)
    layouts = []
    for ranks_E in starts(routing.counts, _together(sample), homes_R, rng):
        layouts.append(Layout(sample, np.arange(E), ranks_E))
        descend(layouts[-1], 20 * E)
    found = _searched(layouts, work, rng)
    spare = sum(slots_per_rank) - E
    if spare:
        more_R = np.asarray(slots_per_rank) - homes_R
        found = _searched([_with_replicas(each, more_R) for each in found[:BEST]], work // 4, rng)
    return min(found, key=lambda layout: price_with_ids(layout, routing.counts))


def _searched(layouts: list[Layout], work: int, rng: np.random.Generator) -> list[Layout]:
    """Return the layouts found from the cheapest on, ascending."""
    best = sorted(layouts, key=Layout.price)[:BEST]
    found = [each for layout in best for each in improved(layout, work // BEST, rng)]
    return sorted(found + layouts, key=Layout.price)


def price_with_ids(layout: Layout, counts: TokenCounts) -> float:
    """Return a layout's price with a discount for pairs on the rank of their token id.

    Of two equally cheap layouts this prefers the one that other uses of a profile gain from."""
    return layout.price() * (1 - LOCAL * local_share(counts, layout.slot_table() >= 0))


def _with_replicas(layout: Layout, more_R: Ints) -> Layout:
    """Return the layout with `more_R` more slots per rank, filled with replicas."""
    ranks_S = np.concatenate([layout.ranks_S, np.repeat(np.arange(len(more_R)), more_R)])
    experts_S = np.concatenate([layout.experts_S, np.full(more_R.sum(), EMPTY)])
    wider = Layout(layout.sample, experts_S, ranks_S)
    fill(wider)
    descend(wider, 20 * len(experts_S))
    return wider


def _from_start(
    sample: WeightedSets, slots_per_rank: Sequence[int], start: Line, max_moves: int | None
) -> Layout:
    experts_S, ranks_S = np.array(start, np.int64), ranks_of(slots_per_rank)
    as_it_is = Layout(sample, experts_S, ranks_S)
    price = sample.objective.costs.move * as_it_is.price()
    most = len(start) if max_moves is None else max_moves
    homes = HomeRanks(held(start, slots_per_rank, sample.experts), price, most)
    layout = Layout(sample, experts_S, ranks_S, homes)
    descend(layout, 20 * len(start))
    if layout.loads().max() <= sample.objective.costs.load_limit * layout.loads().mean():
        return layout
    return improved(layout, REBALANCE_WORK, np.random.default_rng(0))[0]


def _together(sample: WeightedSets) -> Floats:
    """Return the co-occurrence of experts [E, E]; the diagonal has their frequency."""
    sets_MK, E = sample.sets_MK, sample.experts
    K = sets_MK.shape[1]
    at_N = sets_MK[:, :, None] * E + sets_MK[:, None, :]
    return totals(at_N, np.repeat(sample.weights_M, K * K), E * E).reshape(E, E)


def _select_better(
    kept: LayerRouting,
    slots_per_rank: Sequence[int],
    costs: PlacementCosts,
    before: Line,
    after: Line,
    *,
    following: bool,
) -> Line:
    """Return `after` if it is better on the held-out sample, otherwise `before`."""
    if not len(kept.sets_PK):
        return before
    was, now = (line_price(kept, line, slots_per_rank, costs) for line in (before, after))
    moves = sum(moved(before, after, slots_per_rank)) if following else 0
    return after if now < was * (1 - moves * costs.move) else before


HELD_OUT, RUN_TOKENS = 5, 64  # every fifth run is held out
SEARCHED_TOKENS = 32_768  # most distinct sets


def split(routing: LayerRouting) -> tuple[LayerRouting, LayerRouting]:
    """Return the sample to fit on and the held-out one, divided by runs of similar tokens."""
    tokens = len(routing.sets_PK)
    run = max(1, min(RUN_TOKENS, tokens // (2 * HELD_OUT)))
    kept_P = np.arange(tokens) // run % HELD_OUT == HELD_OUT - 1
    parts = [
        routing._replace(sets_PK=routing.sets_PK[part_P], ids_P=routing.ids_P[part_P])
        for part_P in (~kept_P, kept_P)
    ]
    return parts[0], parts[1]


def sample_of(routing: LayerRouting, costs: PlacementCosts, ranks: int) -> WeightedSets:
    """Return the distinct sets with weights, or an even selection if there are too many."""
    sets_PK, E = np.sort(routing.sets_PK.astype(np.int64), axis=1), routing.num_experts
    K = sets_PK.shape[1]
    weights_M = np.ones(len(sets_PK))
    if E**K < 2**62:
        keys_P = sets_PK @ (E ** np.arange(K))
        _, first_M, times_M = np.unique(keys_P, return_index=True, return_counts=True)
        if len(first_M) <= SEARCHED_TOKENS:
            sets_PK, weights_M = sets_PK[first_M], times_M.astype(float)
    if len(sets_PK) > SEARCHED_TOKENS:
        some = np.linspace(0, len(sets_PK) - 1, SEARCHED_TOKENS).astype(int)
        sets_PK, weights_M = sets_PK[some], weights_M[some]
    rows_N = np.argsort(sets_PK.ravel(), kind="stable") // K
    sizes_E = np.bincount(sets_PK.ravel(), minlength=E)
    tokens = float(weights_M.sum())
    objective = Objective(costs, tokens, tokens * K, ranks)
    rows_E = tuple(np.split(rows_N, np.cumsum(sizes_E)[:-1]))
    return WeightedSets(sets_PK, weights_M, rows_E, objective)
