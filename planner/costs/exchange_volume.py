"""Volume that one layer of a batch moves between workers, by scheme.

                     before experts   experts      after   rows per token
    all_reduce       all-reduce       A2A, A2A     AG      3 (D - 1) + 2 u    the paper's baseline
    reduce_scatter   reduce-scatter   A2A, A2A     AG      2 (D - 1) + 2 u
    shuffled         the same, and tokens land where their experts are predicted: u is smaller
    tensor_parallel  all-reduce       all-reduce   -       4 (D - 1)
    data_parallel    -                A2A, A2A     -       2 u                deduplicated DP+EP

Rows have the model's dimension and are counted over all D workers together, which have equal shards
of the tokens. u: other workers that a token is sent to, once each; without deduplication
K (1 - local activation rate), as the paper has it. Speculative MoE, Section 3.2, reconstructed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

INDEX_BYTES, WEIGHT_BYTES, COUNT_BYTES = 4, 4, 4  # of each pair; of each slot of a packet
SQUARES_BYTES = 8  # of a token: of its queries and keys


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


def served_scheme(nodes: Sequence[int]) -> ExchangeScheme:
    """Return the scheme for workers on these nodes.

    Inside a node the rows that shuffling saves cost less than their prediction.
    """
    return ExchangeScheme.SHUFFLED if len(set(nodes)) > 1 else ExchangeScheme.REDUCE_SCATTER


class LayerExchange(NamedTuple):
    """A layer of one batch. slots: of experts on all workers.

    remote_copies, remote_pairs: tokens and (token, expert) pairs sent to other workers, in all.
    predicted_tokens: whose predictions for the next layer are sent, a byte for each worker.
    normed_tokens: whose queries and keys have a norm over all heads: sums of squares are sent.
    """

    workers: int
    tokens: int
    remote_copies: int
    remote_pairs: int
    slots: int
    predicted_tokens: int = 0
    normed_tokens: int = 0


def moved_rows(scheme: ExchangeScheme, workers: int, remote_copies: float) -> float:
    """Return the rows per token. remote_copies: u."""
    exchanged = 0.0 if scheme is ExchangeScheme.TENSOR_PARALLEL else 2 * remote_copies
    return _COLLECTIVE_ROWS[scheme] * (workers - 1) + exchanged


def moved_bytes(scheme: ExchangeScheme, layer: LayerExchange, row_bytes: int) -> int:
    """Return the bytes of the layer: its rows, and the indices and weights of pairs.

    Every worker sends every other one a packet, which also counts the pairs of each slot.
    """
    rows = _COLLECTIVE_ROWS[scheme] * (layer.workers - 1) * layer.tokens
    links = (layer.workers - 1) * layer.workers
    squares = layer.normed_tokens * links * SQUARES_BYTES
    if scheme is ExchangeScheme.TENSOR_PARALLEL:
        return rows * row_bytes + squares
    predicted = layer.predicted_tokens * links
    pairs = layer.remote_pairs * (INDEX_BYTES + WEIGHT_BYTES)
    counts = (layer.workers - 1) * layer.slots * COUNT_BYTES
    return (rows + 2 * layer.remote_copies) * row_bytes + pairs + counts + predicted + squares
