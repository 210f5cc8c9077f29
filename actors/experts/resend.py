"""What was sent to an expert rank that is lost, cut anew for where its experts are now.

A slice is a token group's pairs of one rank. Its pairs keep their weights and their tokens; only
who answers them changes, so that what others have answered already is not asked again.
"""

from __future__ import annotations

import numpy as np

from actors.experts.dispatch import RankSlice
from planner.placement.slots import LayerSlots


def cut_again(
    piece: RankSlice, before: LayerSlots, placed: LayerSlots, first_group: int
) -> list[RankSlice]:
    """The pairs of `piece`, whose local experts are those of `before`, as slices of `placed`, rank
    by rank. first_group: they are token groups of their own, from that number on."""
    low, high = before.bounds[piece.rank]
    expert_N = np.repeat(before.expert_of_slot[low:high], piece.counts_e)
    row_N = piece.index_N + piece.start if piece.rows_U is None else piece.rows_U[piece.index_N]
    slot_N = placed.of_pairs(expert_N[:, None])[:, 0]
    order_N = slot_N.argsort(kind="stable")
    counts_S = np.bincount(slot_N, minlength=placed.count).astype(np.int32)
    ends = [0, *counts_S.cumsum().tolist()]
    slices: list[RankSlice] = []
    for rank, (first, last) in enumerate(placed.bounds):
        pairs_N = order_N[ends[first] : ends[last]]
        if not len(pairs_N):
            continue
        rows_U, index_N = np.unique(row_N[pairs_N], return_inverse=True)
        slices.append(
            RankSlice(
                rank,
                first_group + len(slices),
                piece.start,
                piece.stop,
                rows_U.astype(np.int64),
                index_N.astype(np.int32).ravel(),
                piece.weights_N[pairs_N],
                counts_S[first:last],
            )
        )
    return slices
