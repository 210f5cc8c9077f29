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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.placement.slots import LayerSlots


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


def plan_dispatch(
    topk_ids_TK: NDArray[np.int64],
    topk_weights_TK: NDArray[np.float32],
    token_groups: Sequence[tuple[int, int]],
    placed: LayerSlots,
) -> list[RankSlice]:
    """The packets of one micro-batch, token group by token group, rank by rank; none is empty.
    token_groups: [start, stop) of each, one after the other. placed: the layer's experts."""
    slots = placed.count
    key_N = _sort_keys(topk_ids_TK, token_groups, placed)
    order_N = np.argsort(key_N, kind="stable")
    groups = len(token_groups)
    counts_GS = np.bincount(key_N, minlength=groups * slots).reshape(groups, slots)
    edges = np.concatenate([[0], np.cumsum(counts_GS.ravel())])
    token_N = order_N // topk_ids_TK.shape[1]
    weights_N = topk_weights_TK.ravel()[order_N]
    whole = len(placed.bounds) == 1  # the only rank's pairs hold every token of a group
    slices = []
    for group, (start, stop) in enumerate(token_groups):
        for rank, (low, high) in enumerate(placed.bounds):
            pairs = slice(edges[group * slots + low], edges[group * slots + high])
            if pairs.start == pairs.stop:
                continue
            rows_U, index_N = _rows(token_N[pairs], start, stop, whole=whole)
            counts_e = counts_GS[group, low:high].astype(np.int32)
            slices.append(
                RankSlice(rank, group, start, stop, rows_U, index_N, weights_N[pairs], counts_e)
            )
    return slices


def _sort_keys(
    topk_ids_TK: NDArray[np.int64],
    token_groups: Sequence[tuple[int, int]],
    placed: LayerSlots,
) -> NDArray[np.int64]:
    """Of each pair: its token group * slots + its slot."""
    slot_TK = placed.of_pairs(topk_ids_TK)
    if len(token_groups) > 1:
        starts = np.array([start for start, _ in token_groups[1:]])
        group_T = np.searchsorted(starts, np.arange(len(topk_ids_TK)), "right")
        slot_TK = slot_TK + group_T[:, None] * placed.count
    return slot_TK.ravel()


def _rows(
    token_N: NDArray[np.int64], start: int, stop: int, *, whole: bool
) -> tuple[NDArray[np.int64] | None, NDArray[np.int32]]:
    """`rows_U` and `index_N` of a slice; whole: every token of the group is known to be there."""
    local_N = token_N - start
    if whole:
        return None, local_N.astype(np.int32)
    rows_U, index_N = _deduplicate(local_N, stop - start)
    return None if rows_U is None else rows_U + start, index_N


def _deduplicate(
    token_N: NDArray[np.int64], tokens: int
) -> tuple[NDArray[np.int64] | None, NDArray[np.int32]]:
    """(the distinct tokens, ascending, or None if all of them; each pair's position in them)."""
    present = np.zeros(tokens, dtype=np.int32)
    present[token_N] = 1
    position = np.cumsum(present, dtype=np.int32)
    if position[-1] == tokens:
        return None, token_N.astype(np.int32)
    return np.flatnonzero(present), position[token_N] - 1
