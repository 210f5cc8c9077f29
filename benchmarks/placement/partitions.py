"""Graphs of experts cut by METIS, as well as it can be asked: both graphs, several tolerances and
seeds, and what serves the sample best is taken.

Shapes: E experts, R ranks, N (token id, expert) pairs.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pymetis

from planner.arrays import Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import LayerRouting, local_fraction, measure, token_ranks
from planner.placement.slots import Line, held, layer_slots, line_of

TOLERANCES = (10, 50, 100, 300)  # of a part's weight over the mean, thousandths
SEEDS = range(4)


def metis_ids(routing: LayerRouting, slots_per_rank: Sequence[int], seed: int) -> Line:
    """Of the graph of token ids and experts: what has the highest LAR by the token table."""
    ids_N = np.unique(routing.counts.ids_N, return_inverse=True)[1]
    E, V = routing.num_experts, int(ids_N.max()) + 1
    rows_N, times_N = routing.counts.experts_N, routing.counts.times_N
    weights = np.concatenate([_load(routing), np.bincount(ids_N, times_N, V)])
    light = np.concatenate([np.ones(E), np.zeros(V)])  # experts alone are counted
    graph = _csr(E + V, rows_N, E + ids_N, times_N)
    lines = [
        _line(parts[:E], _affinity(ids_N, parts[E:], routing, len(slots_per_rank)), slots_per_rank)
        for parts in itertools.chain(
            _cut(graph, weights, len(slots_per_rank), seed),
            _cut(graph, light, len(slots_per_rank), seed),
        )
    ]
    return max(lines, key=lambda line: _local(routing, line, slots_per_rank))


def metis_together(routing: LayerRouting, slots_per_rank: Sequence[int], seed: int) -> Line:
    """Of the graph of experts that tokens go to together: what has the fewest copies."""
    E, K = routing.num_experts, routing.sets_PK.shape[1]
    pairs = [(routing.sets_PK[:, a], routing.sets_PK[:, b]) for a in range(K) for b in range(a)]
    rows_N, columns_N = (np.concatenate(each) for each in zip(*pairs, strict=True))
    together_EE = np.bincount(rows_N * E + columns_N, minlength=E * E).reshape(E, E)
    together_EE = (together_EE + together_EE.T).astype(float)
    rows_N, columns_N = np.nonzero(np.triu(together_EE, 1))
    graph = _csr(E, rows_N, columns_N, together_EE[rows_N, columns_N].astype(int))
    R = len(slots_per_rank)
    lines = [
        _line(
            parts,
            np.stack([together_EE[:, parts == r].sum(1) for r in range(R)], 1),
            slots_per_rank,
        )
        for weights in (np.ones(E), _load(routing))
        for parts in _cut(graph, weights, R, seed)
    ]
    return min(lines, key=lambda line: measure(routing, layer_slots(line, slots_per_rank)).copies)


def _load(routing: LayerRouting) -> Floats:
    return routing.load().astype(np.float64)


def _csr(vertices: int, rows_N: Ints, columns_N: Ints, weights_N: Ints) -> tuple[Ints, Ints, Ints]:
    """Both directions of every edge: starts, neighbours, weights."""
    froms, tos = np.concatenate([rows_N, columns_N]), np.concatenate([columns_N, rows_N])
    order = np.argsort(froms, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(froms, minlength=vertices))])
    return starts, tos[order], np.concatenate([weights_N, weights_N])[order]


def _cut(graph: tuple[Ints, Ints, Ints], weights: Floats, ranks: int, seed: int) -> Iterator[Ints]:
    """Parts of vertices, for every tolerance, seed and way of cutting."""
    starts, tos, edges = (each.tolist() for each in graph)
    adjacency = pymetis.CSRAdjacency(starts, tos)
    whole = np.ceil(weights * (10_000 / max(1.0, weights.max()))).astype(int).tolist()
    for tolerance, more, recursive in itertools.product(TOLERANCES, SEEDS, (False, True)):
        options = pymetis.Options(ufactor=tolerance, seed=seed + more, ncuts=4, niter=20)
        _, parts = pymetis.part_graph(
            ranks,
            adjacency=adjacency,
            vweights=whole,
            eweights=edges,
            recursive=recursive,
            options=options,
        )
        yield np.array(parts)


def _affinity(ids_N: Ints, label_V: Ints, routing: LayerRouting, ranks: int) -> Floats:
    """[E, R] pairs of each expert with ids of each part."""
    at_N = routing.counts.experts_N * ranks + label_V[ids_N]
    flat = totals(at_N, routing.counts.times_N, routing.num_experts * ranks)
    return flat.reshape(routing.num_experts, ranks)


def _line(part_E: Ints, affinity_ER: Floats, slots_per_rank: Sequence[int]) -> Line:
    """Parts with as many experts as there are slots: who has least to lose leaves for the rank with
    room that has most of what it goes with."""
    part_E = part_E.copy()
    room_R = np.array(slots_per_rank) - np.bincount(part_E, minlength=len(slots_per_rank))
    while (room_R < 0).any():
        gain_ER = affinity_ER - affinity_ER[np.arange(len(part_E)), part_E][:, None]
        gain_ER[room_R[part_E] >= 0] = -np.inf
        gain_ER[:, room_R <= 0] = -np.inf
        expert, rank = divmod(int(gain_ER.argmax()), len(slots_per_rank))
        room_R[part_E[expert]] += 1
        room_R[rank] -= 1
        part_E[expert] = rank
    return line_of(np.arange(len(part_E)), part_E, slots_per_rank, ())


def _local(routing: LayerRouting, line: Line, slots_per_rank: Sequence[int]) -> float:
    label_V = token_ranks(routing.counts, held(line, slots_per_rank, routing.num_experts))
    return local_fraction(routing, layer_slots(line, slots_per_rank), label_V)
