"""Routing made up: planted groups of experts, and scores of token and document features."""

from __future__ import annotations

import numpy as np

from planner.arrays import Ints
from planner.placement.routing import LayerRouting, TokenCounts

DOCUMENT_TOKENS = 100


def counts_of(num_experts: int, sets_PK: Ints, ids_P: Ints) -> TokenCounts:
    """Of all of these tokens."""
    keys_N, times_N = np.unique(
        (ids_P[:, None] * num_experts + sets_PK).ravel(), return_counts=True
    )
    return TokenCounts(keys_N // num_experts, keys_N % num_experts, times_N)


def routing_of(num_experts: int, sets_PK: Ints, ids_P: Ints) -> LayerRouting:
    return LayerRouting(num_experts, sets_PK, ids_P, counts_of(num_experts, sets_PK, ids_P))


def zipf_ids(ids: int, tokens: int, rng: np.random.Generator) -> Ints:
    shares = 1.0 / (np.arange(ids) + 3.0)
    return rng.choice(ids, tokens, p=shares / shares.sum())


def gaussian(
    num_experts: int, top_k: int, ids: int, *, of_token: float, tokens: int, seed: int
) -> tuple[LayerRouting, LayerRouting]:
    """Two samples alike. of_token: the part of a router's input that the token id fixes (0..1);
    the rest is the document's, and noise."""
    rng = np.random.default_rng(seed)
    dim = 48
    router_DE = rng.standard_normal((dim, num_experts)) / dim**0.5
    embed_VD = rng.standard_normal((ids, dim))

    def sample() -> LayerRouting:
        ids_P = zipf_ids(ids, tokens, rng)
        documents = rng.standard_normal((tokens // DOCUMENT_TOKENS + 1, dim))
        context_PD = documents[np.arange(tokens) // DOCUMENT_TOKENS]
        context_PD = 0.7 * context_PD + 0.7 * rng.standard_normal((tokens, dim))
        hidden_PD = of_token**0.5 * embed_VD[ids_P] + (1 - of_token) ** 0.5 * context_PD
        sets_PK = np.argpartition(-(hidden_PD @ router_DE), top_k, axis=1)[:, :top_k]
        return routing_of(num_experts, sets_PK, ids_P)

    return sample(), sample()


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
