"""Synthetic routing with planted groups of experts."""

import numpy as np

from planner.arrays import Ints
from planner.placement.routing import LayerRouting, TokenCounts


def routing_of(num_experts: int, sets_PK: Ints, ids_P: Ints) -> LayerRouting:
    keys_N, times_N = np.unique(
        (ids_P[:, None] * num_experts + sets_PK).ravel(), return_counts=True
    )
    counts = TokenCounts(keys_N // num_experts, keys_N % num_experts, times_N)
    return LayerRouting(num_experts, sets_PK, ids_P, counts)


def planted(
    num_experts: int, top_k: int, groups: int, *, stray: float, tokens: int, seed: int
) -> tuple[LayerRouting, Ints]:
    """Tokens of which each goes to experts of one group, all but a `stray` part of its pairs; and
    [E] the groups, which are equally large."""
    rng = np.random.default_rng(seed)
    group_E = rng.permutation(np.arange(num_experts) * groups // num_experts)
    members = np.stack([np.flatnonzero(group_E == g) for g in range(groups)])
    ids_P = rng.integers(0, 40 * groups, tokens)
    score_PE = rng.random((tokens, num_experts))
    in_group_PE = group_E[None, :] == (ids_P % groups)[:, None]
    strays_PE = rng.random((tokens, num_experts)) < stray * members.shape[1] / num_experts
    score_PE += np.where(in_group_PE, 2.0, 0.0) + np.where(strays_PE, 3.0, 0.0)
    sets_PK = np.argpartition(-score_PE, top_k, axis=1)[:, :top_k]
    return routing_of(num_experts, sets_PK, ids_P), group_E
