"""Ranks on several nodes: links are fast inside a node and slow between nodes.

    ranks   0 1 | 2 3      a token with experts on 0, 1 and 2 costs least on node 0:
    nodes   0   | 1        a row to the other rank inside, and one to rank 2 outside

Groups of experts are found without regard to nodes and then exchanged between them, or first for
nodes and then for the ranks of each; the cheaper one counts.

Shapes: T tokens, K experts of each, E experts, R ranks, N nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.placement.alignment import aligned, regrouped
from planner.placement.layout import HomeRanks, Layout, Objective, usual_costs
from planner.placement.routing import LayerRouting, TokenCounts, batches_of_ranks, measure
from planner.placement.search import descend, improved
from planner.placement.slots import Line, held, layer_slots, line_of, ranks_of
from planner.placement.solve import REBALANCE_WORK, sample_of, solve_layer, split

OUTER_ROW = 10.0  # time of a row between nodes, in times of a row inside


class NodeCopies(NamedTuple):
    """Copies of a token on other ranks than its own: on its node, and on others."""

    inner: float
    outer: float


class LinkLevels(NamedTuple):
    """Node of each rank. outer_row: time of a row between nodes, in times of a row inside."""

    nodes: tuple[int, ...]
    outer_row: float = OUTER_ROW

    @property
    def outer_fraction(self) -> float:
        """Return the fraction of links that are between nodes."""
        ranks = len(self.nodes)
        outer = sum(one != other for one in self.nodes for other in self.nodes)
        return outer / max(1, ranks * (ranks - 1))

    @property
    def mean_row(self) -> float:
        """Return the time of a row over a link of any two ranks."""
        return 1 + (self.outer_row - 1) * self.outer_fraction

    def landing_values(self, shares_TR: Floats) -> Floats:
        """Return what a token saves by landing on each rank, from the shares of its pairs there.

        A pair costs 1 on another rank of the token's node and `outer_row` on another node.
        """
        if not self.outer_fraction:
            return shares_TR
        node_TR = (shares_TR @ self._members())[:, list(self.nodes)]
        return shares_TR + (self.outer_row - 1) * node_TR

    def copies(self, sent_TR: Bools) -> NodeCopies:
        """Return copies of tokens that are sent to ranks, each from one on the best node."""
        of_node_TN = sent_TR @ self._members()
        own_T = of_node_TN.max(1)
        outer_T = of_node_TN.sum(1) - own_T
        return NodeCopies(float((own_T - 1).mean()), float(outer_T.mean()))

    def row_time(self, copies: NodeCopies) -> float:
        return copies.inner + self.outer_row * copies.outer

    def slots(self, slots_per_rank: Sequence[int]) -> tuple[int, ...]:
        """Return the slots of each node."""
        return tuple(int(slots) for slots in np.asarray(slots_per_rank) @ self._members())

    def _members(self) -> Ints:
        members_RN: Ints = np.eye(max(self.nodes) + 1, dtype=np.int64)[list(self.nodes)]
        return members_RN


def even_nodes(ranks: int, nodes: int) -> LinkLevels:
    """Return levels with as many ranks on each node, in order."""
    return LinkLevels(tuple(rank * nodes // ranks for rank in range(ranks)))


def levels_of_hosts(hosts: Sequence[str]) -> LinkLevels:
    """Return levels of ranks on these hosts."""
    known = list(dict.fromkeys(hosts))
    return LinkLevels(tuple(known.index(host) for host in hosts))


def sent_ranks(routing: LayerRouting, line: Line, slots_per_rank: Sequence[int]) -> Bools:
    """Return True for each rank that serves a token of the sample [T, R]."""
    sent_TR = np.zeros((len(routing.sets_PK), len(slots_per_rank)), bool)
    start = 0
    for ranks_TK in batches_of_ranks(routing, layer_slots(line, slots_per_rank)):
        sent_TR[np.arange(start, start + len(ranks_TK))[:, None], ranks_TK] = True
        start += len(ranks_TK)
    return sent_TR


def solve_on_nodes(
    routing: LayerRouting, slots_per_rank: Sequence[int], levels: LinkLevels, *, seed: int = 0
) -> Line:
    """Return a layer's placement. Ranks of a node are consecutive."""
    plain = solve_layer(routing, slots_per_rank, seed=seed)
    fitted, kept = split(routing)
    if not levels.outer_fraction or not len(kept.sets_PK):
        return plain
    of_node = levels.slots(slots_per_rank)
    found = [_exchanged(fitted, plain, slots_per_rank, levels)]
    if max(of_node) <= routing.num_experts:
        by_node = solve_layer(routing, of_node, seed=seed)
        found.append(_divided(fitted, by_node, slots_per_rank, levels))
    top_k, ranks = routing.sets_PK.shape[1], len(slots_per_rank)
    objective = Objective(usual_costs(top_k, ranks), 1.0, float(top_k), ranks)

    def price(line: Line) -> float:
        copies = levels.copies(sent_ranks(kept, line, slots_per_rank))
        load = measure(kept, layer_slots(line, slots_per_rank)).load
        return float(objective.price(1 + levels.row_time(copies), load * top_k / ranks))

    return min(found, key=price)


def _exchanged(
    routing: LayerRouting, line: Line, slots_per_rank: Sequence[int], levels: LinkLevels
) -> Line:
    """Exchange groups between nodes while that saves time; copies and load stay the same."""
    sent_TR, source_R = sent_ranks(routing, line, slots_per_rank), np.arange(len(slots_per_rank))
    now, is_better = levels.row_time(levels.copies(sent_TR)), True
    pairs = [
        [one, other]
        for one, other in itertools.combinations(range(len(source_R)), 2)
        if levels.nodes[one] != levels.nodes[other] and slots_per_rank[one] == slots_per_rank[other]
    ]
    while is_better:
        is_better = False
        for both in pairs:
            other_R = source_R.copy()
            other_R[both] = source_R[both[::-1]]
            after = levels.row_time(levels.copies(sent_TR[:, other_R]))
            if after < now - 1e-9:
                source_R, now, is_better = other_R, after, True
    return regrouped(line, source_R, slots_per_rank)


def _divided(
    routing: LayerRouting, by_node: Line, slots_per_rank: Sequence[int], levels: LinkLevels
) -> Line:
    """Divide the experts of each node among its ranks; none leaves its node."""
    ranks = len(slots_per_rank)
    sample = sample_of(routing, usual_costs(routing.sets_PK.shape[1], ranks), ranks)
    held_EN = held(by_node, levels.slots(slots_per_rank), routing.num_experts)
    homes = HomeRanks(held_EN[:, list(levels.nodes)], 0.0, 0)
    layout = Layout(sample, np.array(by_node, np.int64), ranks_of(slots_per_rank), homes)
    descend(layout, 20 * len(by_node))
    best = improved(layout, REBALANCE_WORK, np.random.default_rng(0))[0]
    return line_of(best.experts_S, best.ranks_S, slots_per_rank, ())


def aligned_on_nodes(
    lines: Sequence[Line],
    counts: Sequence[TokenCounts],
    slots_per_rank: Sequence[int],
    experts: int,
    levels: LinkLevels,
) -> list[Line]:
    """Return `aligned` lines: whole nodes are exchanged first, then ranks inside of each."""
    if not levels.outer_fraction:
        return aligned(lines, counts, slots_per_rank, experts)
    of_node = levels.slots(slots_per_rank)
    if max(of_node) <= experts:
        lines = aligned(lines, counts, of_node, experts)
    return aligned(lines, counts, slots_per_rank, experts, levels.nodes)
