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


# A packet to be cut: rank, token group, its start and stop, its slots of all token groups' slots,
# its pairs of the sorted ones.
_Piece = tuple[int, int, int, int, slice, slice]


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
    only_one = len(placed.bounds) == 1  # its pairs hold every token of a group
    found = _every_row(token_N, pieces) if only_one else _rows(token_N, pieces)
    return [
        RankSlice(rank, group, start, stop, rows_U, index_N, weights_N[pairs], narrow_S[slots])
        for (rank, group, start, stop, slots, pairs), (rows_U, index_N) in zip(
            pieces, found, strict=True
        )
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
    pieces, first = list[_Piece](), 0
    for group, (start, stop) in enumerate(token_groups):
        for rank, (low, high) in enumerate(placed.bounds):
            begin, end = ends[first + low], ends[first + high]
            if begin < end:
                slots = slice(first + low, first + high)
                pieces.append((rank, group, start, stop, slots, slice(begin, end)))
        first += placed.count
    return pieces


def _every_row(token_N: NDArray[np.int64], pieces: Sequence[_Piece]) -> list[Rows]:
    return [(None, (token_N[p[5]] - p[2]).astype(np.int32)) for p in pieces]


def _rows(token_N: NDArray[np.int64], pieces: Sequence[_Piece]) -> list[Rows]:
    """`rows_U` and `index_N` of each piece, from a line of its token group's tokens for each:

    tokens that go there      1 . 1 1 | . 1 1 .      rank 0 | rank 1
    how many up to each       1 1 2 3 | 0 1 2 2      less one: positions
    """
    width = max(stop - start for _, _, start, stop, _, _ in pieces)
    shifts = [line * width - piece[2] for line, piece in enumerate(pieces)]
    pairs = [piece[5].stop - piece[5].start for piece in pieces]
    at_N = token_N + np.array(shifts).repeat(pairs)
    goes_PW = np.zeros((len(pieces), width), np.int32)
    goes_PW.ravel()[at_N] = 1
    upto_PW = goes_PW.cumsum(axis=1, dtype=np.int32)
    index_N = upto_PW.ravel()[at_N] - 1
    rows_N = goes_PW.ravel().nonzero()[0]
    found, first = list[Rows](), 0
    for piece, shift, rows in zip(pieces, shifts, upto_PW[:, -1].tolist(), strict=True):
        every = rows == piece[3] - piece[2]
        rows_U = None if every else rows_N[first : first + rows] - shift
        found.append((rows_U, index_N[piece[5]]))
        first += rows
    return found
