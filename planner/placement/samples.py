"""The part of a layer's routing that a placement is made of, and the part it is judged on.

Shapes: P sampled tokens, K experts of each, M different sets of experts, E experts.
"""

from __future__ import annotations

import numpy as np

from planner.placement.layout import Sample
from planner.placement.objective import Objective, PlacementCosts
from planner.placement.routing import LayerRouting

HELD_OUT, RUN_TOKENS = 5, 64  # every fifth run of so many tokens is kept out
SEARCHED_TOKENS = 32_768  # of a sample with more different sets of experts, so many


def split(routing: LayerRouting) -> tuple[LayerRouting, LayerRouting]:
    """What a placement is made of, and what it is judged on: runs of tokens, as those of one text
    are alike."""
    tokens = len(routing.sets_PK)
    run = max(1, min(RUN_TOKENS, tokens // (2 * HELD_OUT)))
    kept_P = np.arange(tokens) // run % HELD_OUT == HELD_OUT - 1
    parts = [
        routing._replace(sets_PK=routing.sets_PK[part_P], ids_P=routing.ids_P[part_P])
        for part_P in (~kept_P, kept_P)
    ]
    return parts[0], parts[1]


def sample_of(routing: LayerRouting, costs: PlacementCosts, ranks: int) -> Sample:
    """Equal sets as one; of very many different ones, some."""
    sets_PK, E = np.sort(routing.sets_PK.astype(np.int64), axis=1), routing.num_experts
    K = sets_PK.shape[1]
    weights_M = np.ones(len(sets_PK))
    if E**K < 2**62:
        keys_P = sets_PK @ (E ** np.arange(K))
        _, first_M, times_M = np.unique(keys_P, return_index=True, return_counts=True)
        if len(first_M) <= SEARCHED_TOKENS:
            sets_PK, weights_M = sets_PK[first_M], times_M.astype(float)
    if len(sets_PK) > SEARCHED_TOKENS:
        some = np.linspace(0, len(sets_PK) - 1, SEARCHED_TOKENS).astype(int)
        sets_PK, weights_M = sets_PK[some], weights_M[some]
    rows_N = np.argsort(sets_PK.ravel(), kind="stable") // K
    sizes_E = np.bincount(sets_PK.ravel(), minlength=E)
    tokens = float(weights_M.sum())
    objective = Objective(costs, tokens, tokens * K, ranks)
    rows_E = tuple(np.split(rows_N, np.cumsum(sizes_E)[:-1]))
    return Sample(sets_PK, weights_M, rows_E, objective)
