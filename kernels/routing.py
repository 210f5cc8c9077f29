"""Choice of experts for tokens, and grouping of (token, expert) pairs by expert.

Shapes: T tokens, E experts, e local experts, K top-k, N = number of (token, expert) pairs.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import row_ops
from kernels.compiled import bits_of


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Limits the choice to the `kept` of `groups` whose `best` best experts have the top sum."""

    groups: int = 1
    kept: int = 1
    best: int = 1


class RoutingRule:
    """Choice of a token's top_k experts by their scores, the softmax or sigmoids of logits.

    bias_E counts in the choice of groups and experts, not in the weights. normalize: weights of a
    token sum to 1. rounds: weights are rounded to the dtype of the logits (Qwen3-MoE). scale
    multiplies them. jitter: instead of all these, the rule is `sparsemixer`.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        *,
        normalize: bool,
        sigmoid: bool = False,
        rounds: bool = False,
        limit: GroupLimit = GroupLimit(),
        bias_E: Tensor | None = None,
        scale: float = 1.0,
        jitter: float | None = None,
    ) -> None:
        self._top_k, self._normalize, self._sigmoid = top_k, normalize, sigmoid
        self._rounds, self._limit, self._scale = rounds, limit, scale
        self._bias_E = None if bias_E is None else bias_E.float().contiguous()
        bias, groups = 0 if self._bias_E is None else self._bias_E.data_ptr(), astuple(limit)
        self._jitter = jitter
        score = int(sigmoid) if jitter is None else row_ops.SPARSEMIXER
        flags = experts, score, normalize, rounds
        factor = bits_of(scale if jitter is None else jitter)
        self.fields = np.array((*flags, bias, *groups, factor), np.int64)

    def choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids [T, K] int64, weights [T, K] float32), best expert first."""
        if row_ops.is_compiled(logits_TE):
            ids_TK = torch.empty((len(logits_TE), self._top_k), dtype=torch.int64)
            return ids_TK, self._on_cpu(logits_TE, ids_TK, given=False)
        if self._jitter is not None:
            return sparsemixer(logits_TE, self._jitter, self._top_k)
        scores_TE, limit = self._scores(logits_TE), self._limit
        choice_TE = scores_TE if self._bias_E is None else scores_TE + self._bias_E
        if limit.kept < limit.groups:
            choice_TGe = choice_TE.view(-1, limit.groups, choice_TE.shape[1] // limit.groups)
            groups_TG = torch.topk(choice_TGe, limit.best, dim=-1).values.sum(-1)
            kept_TG = torch.topk(groups_TG, limit.kept, dim=-1).indices
            dropped_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
            choice_TE = choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), -math.inf).flatten(1)
        weights_TK, ids_TK = torch.topk(choice_TE, self._top_k, dim=-1)
        if choice_TE is not scores_TE:
            weights_TK = scores_TE.gather(1, ids_TK)
        return ids_TK, self._finished(weights_TK, logits_TE.dtype)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return [T, K] float32: the weights of given experts."""
        if row_ops.is_compiled(logits_TE):
            return self._on_cpu(logits_TE, ids_TK.contiguous(), given=True)
        if self._jitter is not None:
            return sparsemixer_weights(logits_TE, ids_TK, self._jitter)
        return self._finished(self._scores(logits_TE).gather(1, ids_TK), logits_TE.dtype)

    def _on_cpu(self, logits_TE: Tensor, ids_TK: Tensor, *, given: bool) -> Tensor:
        """Return the weights; write ids unless `given`."""
        weights_TK, (T, K) = torch.empty(ids_TK.shape), ids_TK.shape
        rule, logits = self.fields.ctypes.data, logits_TE.data_ptr()
        wide, results = logits_TE.dtype is torch.float32, (ids_TK.data_ptr(), weights_TK.data_ptr())
        row_ops.choose_experts(wide, rule, logits, T, K, given, *results)
        return weights_TK

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self._sigmoid:
            return logits_TE.float().sigmoid()
        return logits_TE.softmax(-1, dtype=torch.float32)

    def _finished(self, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if self._normalize:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)  # of a softmax: never zero
            weights_TK /= total_T1 + 1e-20 if self._sigmoid else total_T1
        if self._rounds:
            weights_TK = weights_TK.to(dtype).float()
        return weights_TK if self._scale == 1.0 else weights_TK * self._scale


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
