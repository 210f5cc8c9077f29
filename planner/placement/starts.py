"""Where a search begins: experts on ranks without a look at exchanges.

Shapes: E experts, R ranks, N (token id, expert) pairs, V token ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.placement.routing import TokenCounts
from planner.placement.sums import Floats, Ints, totals
from planner.placement.token_ranks import rank_of_ids, shares

RANDOM = 2
ROUNDS = 12  # of ids to experts' ranks and back: then labels hardly change


def in_order(homes_R: Ints) -> Ints:
    """[E] ranks: the first experts on the first."""
    return np.repeat(np.arange(len(homes_R)), homes_R)


def balanced(load_E: Floats, homes_R: Ints) -> Ints:
    """The hottest first, each to the rank that is least loaded and has room."""
    ranks_E, load_R, room_R = np.zeros_like(load_E, np.int64), np.zeros(len(homes_R)), homes_R + 0
    for expert in np.argsort(-load_E, kind="stable"):
        rank = int(np.where(room_R > 0, load_R, np.inf).argmin())
        ranks_E[expert] = rank
        load_R[rank] += load_E[expert]
        room_R[rank] -= 1
    return ranks_E


def grown(together_EE: Floats, homes_R: Ints) -> Ints:
    """Rank by rank: the hottest expert that is left, then whichever goes with those there most
    often, for its load."""
    E = len(together_EE)
    load_E = np.maximum(1.0, together_EE.diagonal())
    ranks_E = np.full(E, -1)
    for rank, room in enumerate(homes_R):
        tied_E = np.zeros(E)
        for n in range(room):
            score_E = tied_E / load_E if n else load_E
            chosen = int(np.where(ranks_E < 0, score_E, -np.inf).argmax())
            ranks_E[chosen] = rank
            tied_E = tied_E + together_EE[chosen]
    return ranks_E


def co_clustered(counts: TokenCounts, ranks_E: Ints, homes_R: Ints) -> Ints:
    """From `ranks_E` on: token ids go where most of their experts are (load at most 1.1), experts
    where most of their ids are, in turn."""
    R, E = len(homes_R), len(ranks_E)
    ids_N = np.unique(counts.ids_N, return_inverse=True)[1]
    for _ in range(ROUNDS):
        holds_ER = ranks_E[:, None] == np.arange(R)
        label_V = rank_of_ids(shares(ids_N, counts.experts_N, counts.times_N, holds_ER))
        at_N = counts.experts_N * R + label_V[ids_N]
        seen_ER = totals(at_N, counts.times_N, E * R).reshape(E, R)
        found_E = _divided(seen_ER, homes_R)
        if (found_E == ranks_E).all():
            break
        ranks_E = found_E
    return ranks_E


def _divided(score_ER: Floats, homes_R: Ints) -> Ints:
    """[E] ranks with so many experts each, for a high sum of scores: who would lose most chooses
    first, then exchanges."""
    E, room_R = len(score_ER), homes_R + 0
    ranks_E = np.full(E, -1)
    best_E2 = np.sort(score_ER, axis=1)[:, -2:]
    for expert in np.argsort(best_E2[:, 0] - best_E2[:, -1], kind="stable"):
        rank = int(np.where(room_R > 0, score_ER[expert], -np.inf).argmax())
        ranks_E[expert] = rank
        room_R[rank] -= 1
    for _ in range(4 * E):
        gain_EE = score_ER[:, ranks_E] - score_ER[np.arange(E), ranks_E][:, None]
        gain_EE = gain_EE + gain_EE.T
        i, j = divmod(int(gain_EE.argmax()), E)
        if gain_EE[i, j] <= 0:
            break
        ranks_E[[i, j]] = ranks_E[[j, i]]
    return ranks_E


def starts(
    counts: TokenCounts, together_EE: Floats, homes_R: Ints, rng: np.random.Generator
) -> Iterator[Ints]:
    """[E] ranks, of each start."""
    yield in_order(homes_R)
    yield balanced(together_EE.diagonal(), homes_R)
    yield (packed := grown(together_EE, homes_R))
    if len(counts.ids_N):
        yield co_clustered(counts, packed, homes_R)
    for _ in range(RANDOM):
        yield rng.permutation(in_order(homes_R))
