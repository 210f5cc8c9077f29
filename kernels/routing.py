"""Choice of experts for tokens, and grouping of (token, expert) pairs by expert.

Shapes: T tokens, E experts, e local experts, K top-k, N = number of (token, expert) pairs.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from kernels import row_ops


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLimit:
    """Limits the choice to the `kept` of `groups` whose `best` best experts have the top sum."""

    groups: int
    kept: int
    best: int


def softmax_top_k(
    logits_TE: Tensor, top_k: int, *, normalize: bool, round_to: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] float32): softmax over all experts, then the top k.

    normalize: weights of a token sum to 1. round_to: a dtype that the weights are rounded to
    (Qwen3-MoE uses the model's).
    """
    if row_ops.is_compiled(logits_TE):
        ids_TK = torch.empty((len(logits_TE), top_k), dtype=torch.int64)
        return ids_TK, _on_cpu(logits_TE, ids_TK, normalize, round_to, given=False)
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weights_TK, ids_TK = torch.topk(probs_TE, top_k, dim=-1)
    return ids_TK, _weighted(weights_TK, normalize=normalize, round_to=round_to)


def softmax_weights(
    logits_TE: Tensor, ids_TK: Tensor, *, normalize: bool, round_to: torch.dtype | None = None
) -> Tensor:
    """Return [T, K] float32: the weights of `softmax_top_k` for given experts."""
    if row_ops.is_compiled(logits_TE):
        return _on_cpu(logits_TE, ids_TK.contiguous(), normalize, round_to, given=True)
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return _weighted(probs_TE.gather(1, ids_TK), normalize=normalize, round_to=round_to)


def _on_cpu(
    logits_TE: Tensor,
    ids_TK: Tensor,
    normalize: bool,
    round_to: torch.dtype | None,
    *,
    given: bool,
) -> Tensor:
    """Return the weights of the top k, whose ids are written unless `given`."""
    weights_TK = torch.empty(ids_TK.shape)
    row_ops.softmax_top_k(
        logits_TE.dtype is torch.float32,
        logits_TE.data_ptr(),
        len(logits_TE),
        logits_TE.shape[1],
        ids_TK.shape[1],
        given,
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        normalize,
        round_to is torch.bfloat16,
    )
    return weights_TK


def _weighted(probs_TK: Tensor, *, normalize: bool, round_to: torch.dtype | None) -> Tensor:
    if normalize:
        probs_TK /= probs_TK.sum(dim=-1, keepdim=True)
    if round_to is not None and round_to is not torch.float32:
        probs_TK = probs_TK.to(round_to).float()
    return probs_TK


def limited_top_k(
    scores_TE: Tensor, top_k: int, limit: GroupLimit, *, bias_E: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] float32): the top k within the kept groups.

    bias_E counts in the choice of groups and experts, not in the weights. normalize: weights of a
    token sum to 1.
    """
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if limit.kept < limit.groups:
        choice_TGe = choice_TE.view(-1, limit.groups, choice_TE.shape[1] // limit.groups)
        groups_TG = torch.topk(choice_TGe, limit.best, dim=-1).values.sum(-1)
        kept_TG = torch.topk(groups_TG, limit.kept, dim=-1).indices
        dropped_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
        choice_TE = choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)
    ids_TK = torch.topk(choice_TE, top_k, dim=-1).indices
    return ids_TK, score_weights(scores_TE, ids_TK, normalize=normalize)


def score_weights(scores_TE: Tensor, ids_TK: Tensor, *, normalize: bool) -> Tensor:
    """Return [T, K] float32: the weights of `limited_top_k` for given experts."""
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK /= weights_TK.sum(dim=-1, keepdim=True) + 1e-20
    return weights_TK


def sparsemixer(logits_TE: Tensor, jitter: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] float32) by SparseMixer-v2, Phi-3.5-MoE's rule.

    Experts are taken best first, each with the weight that `sparsemixer_weights` returns.
    """
    ids_TK = torch.topk(logits_TE, top_k, dim=-1).indices
    return ids_TK, sparsemixer_weights(logits_TE, ids_TK, jitter)


def sparsemixer_weights(logits_TE: Tensor, ids_TK: Tensor, jitter: float) -> Tensor:
    """Return [T, K] float32: weights of given experts, in their order.

    An expert's weight is the softmax over those experts not taken before whose logit is at most
    2 * jitter below the best one's, relative to the larger of that and the expert's absolute logit.
    """
    weights, left_TE = [], logits_TE
    for ids_T1 in torch.split(ids_TK, 1, dim=1):
        best_T1 = left_TE.max(dim=-1, keepdim=True).values
        distant_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        probs_TE = left_TE.masked_fill(distant_TE, float("-inf")).softmax(-1, dtype=torch.float32)
        weights.append(probs_TE.gather(1, ids_T1))
        left_TE = left_TE.scatter(1, ids_T1, float("-inf"))
    return torch.cat(weights, dim=1)


def group_by_expert(
    ids_TK: Tensor, weights_TK: Tensor, local_of_E: Tensor, num_local: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Return (rows_N, weights_N, counts_e): local experts' pairs, by expert, then by token.

    local_of_E [E] int64: local index of each expert, num_local if it is not local.
    """
    if ids_TK.device.type == "cpu":
        return _grouped_on_cpu(ids_TK.contiguous(), weights_TK.contiguous(), local_of_E, num_local)
    local_N = local_of_E[ids_TK].flatten()
    local_N, order_N = torch.sort(local_N, stable=True)
    counts = torch.bincount(local_N, minlength=num_local + 1)[:num_local].tolist()
    order_N = order_N[: sum(counts)]
    rows_N = torch.div(order_N, ids_TK.shape[1], rounding_mode="floor")
    return rows_N, weights_TK.flatten()[order_N], counts


def _grouped_on_cpu(
    ids_TK: Tensor, weights_TK: Tensor, local_of_E: Tensor, num_local: int
) -> tuple[Tensor, Tensor, list[int]]:
    rows_N, weights_N = (
        torch.empty(ids_TK.numel(), dtype=torch.int64),
        weights_TK.new_empty((ids_TK.numel(),)),
    )
    counts_e = np.empty(num_local, np.int64)
    row_ops.group_pairs(
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        local_of_E.data_ptr(),
        ids_TK.numel(),
        ids_TK.shape[1],
        num_local,
        rows_N.data_ptr(),
        weights_N.data_ptr(),
        counts_e.ctypes.data,
    )
    counts: list[int] = counts_e.tolist()
    pairs = sum(counts)
    return rows_N[:pairs], weights_N[:pairs], counts


def local_index(expert_ids: list[int], num_experts: int) -> Tensor:
    """Return local_of_E for `group_by_expert`: the position of each expert in `expert_ids`."""
    local_of_E = torch.full((num_experts,), len(expert_ids), dtype=torch.int64)
    local_of_E[torch.tensor(expert_ids, dtype=torch.int64)] = torch.arange(len(expert_ids))
    return local_of_E
