"""Assignment of token ids to ranks: the rank with most of an id's experts, within a load bound.

Shapes: N (token id, expert) pairs, V token ids, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.placement.layout import totals
from planner.placement.routing import TokenCounts

ID_LOAD = 1.1  # limit of a rank's pairs over the mean, as in the paper


def shares(ids_N: Ints, experts_N: Ints, times_N: Ints, holds_ER: Bools) -> Floats:
    """Return each id's pairs per rank with the expert [V, R], and their total in a last column."""
    V, R = int(ids_N.max()) + 1 if len(ids_N) else 0, holds_ER.shape[1]
    here_NR = holds_ER[experts_N] * times_N[:, None]
    columns = [totals(ids_N, column_N, V) for column_N in (*here_NR.T, times_N)]
    return np.stack(columns, 1).reshape(V, R + 1)


def rank_of_ids(shares_VR1: Floats) -> Ints:
    """Return the rank of each id [V]: ids with the least regret leave overloaded ranks.

    Ids without a pair are distributed in turn."""
    local_VR, times_V = shares_VR1[:, :-1].copy(), shares_VR1[:, -1]
    V, R = local_VR.shape
    room = ID_LOAD * times_V.sum() / R
    label_V: Ints = np.where(times_V > 0, local_VR.argmax(1), np.arange(V) % R)
    for _ in range(R):
        load_R = totals(label_V, times_V, R)
        over = int(load_R.argmax())
        if load_R[over] <= room:
            break
        open_R = load_R < room
        open_R[over] = False
        if not open_R.any():
            break
        _give_away(label_V, local_VR, times_V, over, load_R, room)
    return label_V


def _give_away(
    label_V: Ints, local_VR: Floats, times_V: Floats, over: int, load_R: Floats, room: float
) -> None:
    """Move ids from an overloaded rank to others in order of regret per pair, in place."""
    ids = np.flatnonzero((label_V == over) & (times_V > 0))
    other_VR = local_VR[ids].copy()
    other_VR[:, over] = -1.0
    regret_V = (local_VR[ids, over] - other_VR.max(1)) / times_V[ids]
    for n in np.argsort(regret_V, kind="stable"):
        if load_R[over] <= room:
            return
        times = times_V[ids[n]]
        fits_R = load_R + times <= room
        fits_R[over] = False
        if not fits_R.any():
            continue
        rank = int(np.where(fits_R, other_VR[n], -1.0).argmax())
        label_V[ids[n]] = rank
        load_R[over] -= times
        load_R[rank] += times


def token_ranks(counts: TokenCounts, holds_ER: Bools) -> Ints:
    """Return the rank of each token id up to the largest counted [V]."""
    return rank_of_ids(shares(counts.ids_N, counts.experts_N, counts.times_N, holds_ER))


def local_share(counts: TokenCounts, holds_ER: Bools) -> float:
    """Return the local activation rate of the counted pairs under that assignment."""
    shares_VR1 = shares(counts.ids_N, counts.experts_N, counts.times_N, holds_ER)
    if not len(shares_VR1):
        return 0.0
    label_V = rank_of_ids(shares_VR1)
    local_V = shares_VR1[np.arange(len(label_V)), label_V]
    return float(local_V.sum() / max(1.0, shares_VR1[:, -1].sum()))
