"""Volume formulas against the bytes of simulated collectives and packets of real routing."""

import itertools

import numpy as np
import pytest
import torch

from actors.moe.dispatch import plan_dispatch
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.arrays import Array, Ints
from planner.costs.exchange_volume import (
    ExchangeScheme,
    LayerExchange,
    moved_bytes,
    moved_rows,
    served_scheme,
)
from planner.placement.shuffling import shard_bounds, shuffled_order
from planner.placement.slots import LayerSlots, contiguous_line, layer_slots

D, TOKENS, X_1D = 4, 1001, torch.zeros(1, 4)
FOLDER = resolve_model_folder(BUNDLED)


def reduce_scatter(x_WTD: Array) -> tuple[Array, int]:
    """Return the sums, each shard at its worker, and the bytes that a ring sends for it."""
    workers, sent_bytes = len(x_WTD), 0
    bounds = shard_bounds(TOKENS, workers)
    held = [np.split(x_TD, bounds[1:-1]) for x_TD in x_WTD.copy()]
    for step in range(workers - 1):
        for worker in range(workers):
            chunk = held[worker][(worker - step - 1) % workers]
            sent_bytes += chunk.nbytes
            held[(worker + 1) % workers][(worker - step - 1) % workers] += chunk
    return np.concatenate([held[worker][worker] for worker in range(workers)]), sent_bytes


def all_gather(shards_TD: Array, workers: int) -> int:
    """Return the bytes of a ring in which each worker passes on every shard but the next one's."""
    shards = np.split(shards_TD, shard_bounds(TOKENS, workers)[1:-1])
    return sum(shards[w - step].nbytes for step in range(workers - 1) for w in range(workers))


def exchange(ids_TK: Ints, placed: LayerSlots, bounds: Ints) -> int:
    """Return the bytes of the packets to other workers, and of the rows they send back."""
    sent_bytes = 0
    for worker, (start, stop) in enumerate(itertools.pairwise(bounds)):
        ids, weights = ids_TK[start:stop], np.ones((stop - start, 2), np.float32)
        for piece in plan_dispatch(ids, weights, [(0, stop - start)], placed):
            if piece.rank != worker:
                row_bytes, *rest = (part.num_bytes for part in piece.parts(X_1D))
                sent_bytes += 2 * row_bytes + sum(rest)
    return sent_bytes


def test_rows_are_those_of_measured_copies_and_shuffling_never_beats_data_parallel() -> None:
    for scheme, copies, rows in (
        ("all_reduce", 0.74, 4.48),
        ("reduce_scatter", 0.74, 3.48),
        ("shuffled", 0.545, 3.09),  # and with grouped experts
        ("shuffled", 0.377, 2.754),
    ):
        assert moved_rows(ExchangeScheme(scheme), 2, copies) == pytest.approx(rows)
    for workers in range(1, 9):
        most = moved_rows(ExchangeScheme.DATA_PARALLEL, workers, workers - 1)
        assert most <= moved_rows(ExchangeScheme.SHUFFLED, workers, 0)


def test_served_batches_are_shuffled_between_nodes_only() -> None:
    assert served_scheme((0, 0, 0)) is ExchangeScheme.REDUCE_SCATTER
    assert served_scheme((0, 1, 0)) is ExchangeScheme.SHUFFLED


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("scheme", ExchangeScheme)
def test_bytes_equal_those_of_a_simulated_layer(scheme: ExchangeScheme, workers: int) -> None:
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, read_spec(FOLDER))
    ids_TK = counts.paths.paths_PLK[:TOKENS, 2].astype(np.int64)
    bounds = shard_bounds(TOKENS, workers)
    slots = np.diff(shard_bounds(16, workers)).tolist()
    placed = layer_slots(contiguous_line(np.ones(16, np.int64), slots), slots)
    if scheme is ExchangeScheme.SHUFFLED:
        ids_TK = ids_TK[shuffled_order(placed.held(16)[ids_TK].mean(1))]
    x_WTD = np.random.default_rng(0).integers(0, 9, (workers, TOKENS, D)).astype(np.float32)
    sums_TD, scattered = reduce_scatter(x_WTD)
    assert (sums_TD == x_WTD.sum(0)).all()
    gathered, exchanged = all_gather(sums_TD, workers), exchange(ids_TK, placed, bounds)
    sent_bytes = {
        ExchangeScheme.ALL_REDUCE: scattered + gathered + exchanged + gathered,
        ExchangeScheme.TENSOR_PARALLEL: 2 * (scattered + gathered),
        ExchangeScheme.DATA_PARALLEL: exchanged,
    }.get(scheme, scattered + exchanged + gathered)
    ranks_TK = placed.ranks_of(placed.of_pairs(ids_TK))
    home_T = np.repeat(np.arange(workers), np.diff(bounds))
    copies = sum(len({*row} - {home}) for row, home in zip(ranks_TK.tolist(), home_T, strict=True))
    pairs = int((ranks_TK != home_T[:, None]).sum())
    layer = LayerExchange(workers, TOKENS, copies, pairs, slots=16)
    assert sent_bytes == moved_bytes(scheme, layer, row_bytes=4 * D)
