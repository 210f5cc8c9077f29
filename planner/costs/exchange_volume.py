"""Volume that one layer of a batch moves between workers, by scheme.

                     before experts   experts      after   rows per token
    all_reduce       all-reduce       A2A, A2A     AG      3 (D - 1) + 2 u    the paper's baseline
    reduce_scatter   reduce-scatter   A2A, A2A     AG      2 (D - 1) + 2 u
    shuffled         the same, and tokens land where their experts are predicted: u is smaller
    tensor_parallel  all-reduce       all-reduce   -       4 (D - 1)
    data_parallel    -                A2A, A2A     -       2 u                deduplicated DP+EP

Rows have the model's dimension and are counted over all workers together. D workers with equal
shards of the tokens; u: other workers that a token is sent to, once each. Without deduplication u
is K (1 - local activation rate), as the paper has it. u is at most D - 1, so data_parallel never
moves more than shuffled. Speculative MoE, Section 3.2, reconstructed. No product module imports
this yet: token shuffling (s-TS) will.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

INDEX_BYTES, WEIGHT_BYTES, COUNT_BYTES = 4, 4, 4  # of each pair; of each slot of a packet


class ExchangeScheme(enum.StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    SHUFFLED = "shuffled"
    TENSOR_PARALLEL = "tensor_parallel"
    DATA_PARALLEL = "data_parallel"


_COLLECTIVE_ROWS = {  # in D - 1 rows per token
    ExchangeScheme.ALL_REDUCE: 3,
    ExchangeScheme.REDUCE_SCATTER: 2,
    ExchangeScheme.SHUFFLED: 2,
    ExchangeScheme.TENSOR_PARALLEL: 4,
    ExchangeScheme.DATA_PARALLEL: 0,
}


class LayerExchange(NamedTuple):
    """A layer of one batch. slots: of experts on all workers.

    remote_copies, remote_pairs: tokens and (token, expert) pairs sent to other workers, in all.
    """

    workers: int
    tokens: int
    remote_copies: int
    remote_pairs: int
    slots: int


def moved_rows(scheme: ExchangeScheme, workers: int, remote_copies: float) -> float:
    """Return the rows per token. remote_copies: u."""
    exchanged = 0.0 if scheme is ExchangeScheme.TENSOR_PARALLEL else 2 * remote_copies
    return _COLLECTIVE_ROWS[scheme] * (workers - 1) + exchanged


def moved_bytes(scheme: ExchangeScheme, layer: LayerExchange, row_bytes: int) -> int:
    """Return the bytes of the layer: its rows, and the indices and weights of pairs.

    Every worker sends every other one a packet, which also counts the pairs of each slot.
    """
    rows = _COLLECTIVE_ROWS[scheme] * (layer.workers - 1) * layer.tokens
    if scheme is ExchangeScheme.TENSOR_PARALLEL:
        return rows * row_bytes
    pairs = layer.remote_pairs * (INDEX_BYTES + WEIGHT_BYTES)
    counts = (layer.workers - 1) * layer.slots * COUNT_BYTES
    return (rows + 2 * layer.remote_copies) * row_bytes + pairs + counts
