"""Which rows of a micro-batch go to which expert rank, and how their answers come back.

Routing becomes packets in one sort. For T tokens with K experts each, the T*K (token, expert) pairs
are sorted by (token group, expert slot); the pairs of one token group and one expert rank are then
one contiguous range, in the order in which that rank's grouped GEMM wants them:

    pairs, sorted   | group 0: slots of rank 0 | slots of rank 1 | group 1: slots of rank 0 | ...

A token that several experts of a rank want travels once (Speculative MoE, Section 4: deduplicated).
Index arithmetic is numpy on the CPU: sizes must be known there before a packet can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.placement.slots import LayerSlots

Rows = tuple[NDArray[np.int64] | None, NDArray[np.int32]]  # rows_U and index_N


class RankSlice(NamedTuple):
    """What one token group sends to one expert rank; `combine` needs it again for the answer.

    rows_U: rows of the micro-batch, ascending, each once. None: every row of the group.
    index_N, weights_N: per pair, its position in rows_U and its weight. counts_e: pairs per local
    expert.
    """

    rank: int
    token_group: int
    start: int
    stop: int
    rows_U: NDArray[np.int64] | None
    index_N: NDArray[np.int32]
    weights_N: NDArray[np.float32]
    counts_e: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.rows_U is None else len(self.rows_U)


class _Piece(NamedTuple):
    """A packet to be cut. slots: of its rank, [first, last) of all token groups' slots; pairs:
    [first, last) of the sorted ones."""

    rank: int
    token_group: int
    start: int
    stop: int
    slots: slice
    pairs: slice


def plan_dispatch(
    topk_ids_TK: NDArray[np.int64],
    topk_weights_TK: NDArray[np.float32],
    token_groups: Sequence[tuple[int, int]],
    placed: LayerSlots,
    *,
    free_rank: int | None = None,
) -> list[RankSlice]:
    """The packets of one micro-batch, token group by token group, rank by rank; none is empty.
    token_groups: [start, stop) of each, one after the other. placed: the layer's experts.
    free_rank: one that a token goes to at no cost."""
    key_N = _sort_keys(placed.of_pairs(topk_ids_TK, free_rank), token_groups, placed.count)
    order_N = key_N.argsort(kind="stable")
    counts_S = np.bincount(key_N, minlength=len(token_groups) * placed.count)
    pieces = _pieces(counts_S, token_groups, placed)
    if not pieces:
        return []
    token_N = order_N // topk_ids_TK.shape[1]
    weights_N = topk_weights_TK.ravel()[order_N]
    narrow_S = counts_S.astype(np.int32)
    found: list[Rows]
    if len(placed.bounds) == 1:  # the only rank's pairs hold every token of a group
        found = [(None, (token_N[p.pairs] - p.start).astype(np.int32)) for p in pieces]
    else:
        found = _rows(token_N, pieces, len(placed.bounds), len(topk_ids_TK))
    return [
        RankSlice(*piece[:4], rows_U, index_N, weights_N[piece.pairs], narrow_S[piece.slots])
        for piece, (rows_U, index_N) in zip(pieces, found, strict=True)
    ]


def _sort_keys(
    slot_TK: NDArray[Any], token_groups: Sequence[tuple[int, int]], slots: int
) -> NDArray[Any]:
    """Of each pair: its token group * slots + its slot."""
    if len(token_groups) > 1:
        group_T = np.zeros(len(slot_TK), np.int64)
        group_T[[start for start, _ in token_groups[1:]]] = slots
        if len(token_groups) * slots < 1 << 15:  # narrow ones are sorted sooner
            group_T = group_T.astype(np.int16)
        slot_TK = slot_TK + group_T.cumsum(dtype=group_T.dtype)[:, None]
    return slot_TK.ravel()


def _pieces(
    counts_S: NDArray[np.int64], token_groups: Sequence[tuple[int, int]], placed: LayerSlots
) -> list[_Piece]:
    ends = [0, *counts_S.cumsum().tolist()]
    pieces = []
    for group, (start, stop) in enumerate(token_groups):
        first = group * placed.count
        for rank, (low, high) in enumerate(placed.bounds):
            slots = slice(first + low, first + high)
            pairs = slice(ends[slots.start], ends[slots.stop])
            if pairs.start < pairs.stop:
                pieces.append(_Piece(rank, group, start, stop, slots, pairs))
    return pieces


def _rows(
    token_N: NDArray[np.int64], pieces: Sequence[_Piece], ranks: int, tokens: int
) -> list[Rows]:
    """`rows_U` and `index_N` of each piece, from a line of all tokens for each rank:

    tokens that go there   1 . 1 1 | . 1 1 .      rank 0 | rank 1
    how many before        0 1 1 2   3 3 4 5      less those before the piece: positions
    """
    firsts = [piece.rank * tokens + piece.start for piece in pieces]
    pairs = [piece.pairs.stop - piece.pairs.start for piece in pieces]
    lines_N = np.repeat([piece.rank * tokens for piece in pieces], pairs)
    first_N = lines_N if pieces[-1].token_group == 0 else np.repeat(firsts, pairs)
    goes_N = np.zeros(ranks * tokens + 1, np.int32)
    at_N = token_N + lines_N
    goes_N[at_N + 1] = 1
    before_N = goes_N.cumsum(dtype=np.int32)
    index_N = before_N[at_N] - before_N[first_N]
    rows_N = goes_N[1:].nonzero()[0]
    found = []
    for piece, first in zip(pieces, firsts, strict=True):
        low, high = before_N[first], before_N[first + piece.stop - piece.start]
        every = high - low == piece.stop - piece.start
        rows_U = None if every else rows_N[low:high] - piece.rank * tokens
        found.append((rows_U, index_N[piece.pairs]))
    return found
