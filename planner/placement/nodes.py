"""Ranks on several nodes: links are fast inside a node and slow between nodes.

    ranks   0 1 | 2 3      a token with experts on 0, 1 and 2 costs least on node 0:
    nodes   0   | 1        a row to the other rank inside, and one to rank 2 outside

Groups of experts are found without regard to nodes and then exchanged between them, or first for
nodes and then for the ranks of each; the cheaper one counts.

Each layer is solved by itself, so its groups of experts are numbered at random. `aligned` exchanges
the groups of ranks with equal slots, so that token ids find their experts on one rank in all
layers. That changes neither copies nor load, and raises the share of a request's pairs on its best
rank, which request routing uses (`LocalShares`).

Shapes: T tokens, K experts of each, E experts, R ranks, N nodes, V token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from contracts.placement import bounds_of
from planner.arrays import Bools, Floats, Ints
from planner.placement.layout import HomeRanks, Layout, Objective, usual_costs
from planner.placement.routing import LayerRouting, TokenCounts, batches_of_ranks, measure, shares
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


MAX_ROUNDS = 20  # over all layers; two or three are usual


def aligned(
    lines: Sequence[Line],
    counts: Sequence[TokenCounts],
    slots_per_rank: Sequence[int],
    experts: int,
    nodes: Sequence[int] | None = None,
) -> list[Line]:
    """Return the lines of all layers with the ranks of equal slots exchanged.

    Maximises the squared norm of the sum over layers of each id's pairs per rank beyond the mean
    share. nodes: of the ranks, if only ranks of one node may be exchanged."""
    kinds = list(zip(slots_per_rank, nodes or [0] * len(slots_per_rank), strict=True))
    ids = max(int(each.ids_N.max(initial=-1)) + 1 for each in counts)
    tables = [
        _deviations(shares(*each, held(line, slots_per_rank, experts)), ids)
        for line, each in zip(lines, counts, strict=True)
    ]
    total_VR = np.zeros_like(tables[0])
    source = [np.arange(len(slots_per_rank)) for _ in lines]  # of each rank's group
    for turn in range(MAX_ROUNDS):
        changed = False
        for layer, table_VR in enumerate(tables):
            if turn:
                total_VR -= table_VR[:, source[layer]]
            better_R = _assignment(total_VR.T @ table_VR, source[layer], kinds)
            changed |= bool((better_R != source[layer]).any())
            source[layer] = better_R
            total_VR += table_VR[:, better_R]
        if not changed:
            break
    return [regrouped(line, each, slots_per_rank) for line, each in zip(lines, source, strict=True)]


def _deviations(shares_VR1: Floats, ids: int) -> Floats:
    """Return pairs beyond the mean share, by the root of an id's pairs; zeros without any."""
    times_V1, all_R1 = shares_VR1[:, -1:], shares_VR1.sum(0)
    mean_R = all_R1[:-1] / max(1.0, all_R1[-1])
    found_VR = (shares_VR1[:, :-1] - times_V1 * mean_R) / np.sqrt(np.maximum(times_V1, 1.0))
    return np.pad(found_VR, ((0, ids - len(found_VR)), (0, 0)))


def _assignment(gain_RR: Floats, start_R: Ints, kinds: Sequence[tuple[int, int]]) -> Ints:
    """Return the group of each rank by exchanges that raise the sum of gain[rank, group].

    kinds: only groups of ranks of one kind are exchanged."""
    source_R, is_better = start_R.copy(), True
    pairs = [
        [one, other]
        for one, other in itertools.combinations(range(len(start_R)), 2)
        if kinds[one] == kinds[other]
    ]
    while is_better:
        is_better = False
        for both in pairs:
            now, after = gain_RR[both, source_R[both]], gain_RR[both, source_R[both[::-1]]]
            if after.sum() > now.sum() * (1 + 1e-9) + 1e-9:
                source_R[both] = source_R[both[::-1]]
                is_better = True
    return source_R


def regrouped(line: Line, source_R: Ints, slots_per_rank: Sequence[int]) -> Line:
    """Return a line with the group `source_R[r]` on each rank r."""
    groups = [line[low:high] for low, high in bounds_of(slots_per_rank)]
    return tuple(itertools.chain.from_iterable(groups[group] for group in source_R))


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
