"""Samples of routing, made up."""

import numpy as np

from benchmarks.placement.synthetic import planted, routing_of
from planner.placement.routing import LayerRouting


def any_routing(
    num_experts: int, top_k: int, tokens: int, seed: int, ids: int = 20
) -> LayerRouting:
    """Some experts are hotter than others, and token ids have favourites."""
    rng = np.random.default_rng(seed)
    ids_P = rng.integers(0, ids, tokens)
    taste_VE = 2.0 * rng.standard_normal((ids, num_experts)) + rng.standard_normal(num_experts)
    noise_PE = rng.gumbel(size=(tokens, num_experts))
    sets_PK = np.argsort(-(taste_VE[ids_P] + noise_PE), axis=1)[:, :top_k]
    return routing_of(num_experts, sets_PK, ids_P)


def grouped(num_experts: int, top_k: int, groups: int, tokens: int, seed: int) -> LayerRouting:
    """As DeepSeek's router does it: experts of few neighbouring groups."""
    routing, group_E = planted(num_experts, top_k, groups, stray=0.02, tokens=tokens, seed=seed)
    order = np.argsort(group_E, kind="stable")
    name_E = np.empty_like(order)
    name_E[order] = np.arange(num_experts)
    return routing_of(num_experts, name_E[routing.sets_PK], routing.ids_P)
