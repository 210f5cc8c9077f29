"""Routers of MoE layers.

Shapes: T tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.fused_ops import sigmoid
from kernels.linear import PackedLinear
from kernels.routing import (
    GroupLimit,
    limited_top_k,
    score_weights,
    softmax_top_k,
    softmax_weights,
    sparsemixer,
    sparsemixer_weights,
)
from kernels.steps import LIGHT_ROWS, Steps, row_tiles
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.loading import Loader


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Input of the experts: x_TD in the model dtype, ids int64, weights float32.

    plain_TD: the router's input, if x_TD is that times the weights.
    """

    x_TD: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    plain_TD: Tensor | None = None

    @property
    def router_input(self) -> Tensor:
        """Input of the router and of shared experts."""
        return self.x_TD if self.plain_TD is None else self.plain_TD


class ExpertRouter:
    """The router of one layer."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        weight_specs = layout.router_tensors(spec, layer)
        router = loader.load(weight_specs["router"])
        self._dtype = router.dtype
        self._scores = PackedLinear(
            router, loader.load(weight_specs["bias"]) if "bias" in weight_specs else None
        )
        correction = weight_specs.get("correction")
        self._correction = None if correction is None else loader.load(correction).flatten()
        self.experts = spec.num_experts
        self.top_k = spec.top_k
        self._routing = spec.routing
        self._plain = spec.family.routing == "softmax"
        self._weighs_input = spec.family.weighs_input
        self._rounds = spec.family.rounds_topk_weights

    def __call__(self, x_TD: Tensor) -> RoutedTokens:
        return self._applied(self.choose(x_TD, self.logits(x_TD)))

    def steps(self, x_TD: Tensor) -> Steps[RoutedTokens]:
        """Route tile by tile."""
        chosen: list[RoutedTokens] = []
        for tile in row_tiles(x_TD, LIGHT_ROWS):
            if chosen:
                yield
            chosen.append(self.choose(x_TD[tile], self.logits(x_TD[tile])))
        if len(chosen) == 1:
            return self._applied(chosen[0])
        ids_TK = torch.cat([part.topk_ids_TK for part in chosen])
        weights_TK = torch.cat([part.topk_weights_TK for part in chosen])
        return self._applied(RoutedTokens(x_TD, ids_TK, weights_TK))

    def _applied(self, routed: RoutedTokens) -> RoutedTokens:
        """Multiply the input of one expert per token by its weight, where the model does that."""
        if not self._weighs_input:
            return routed
        x_TD, weights_T1 = routed.x_TD, routed.topk_weights_TK
        return RoutedTokens(
            x_TD * weights_T1.to(x_TD.dtype), routed.topk_ids_TK, torch.ones_like(weights_T1), x_TD
        )

    def decode_fields(self, dtype: torch.dtype) -> tuple[int, ...] | None:
        """Return the router's fields of `attend_layer` for rows of a dtype, or None."""
        if not self._plain or dtype is not self._dtype or self._scores.kind is None:
            return None
        rounds = self._rounds and dtype is torch.bfloat16
        normalize = self._routing.normalize
        return *self._scores.addresses, self.experts, self.top_k, normalize, rounds

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return [T, E]."""
        return self._scores(x_TD.to(self._dtype))

    def choose(self, x_TD: Tensor, logits_TE: Tensor) -> RoutedTokens:
        """Return the experts of x_TD and their weights by the family's rule."""
        routing = self._routing
        if self._plain:
            ids_TK, weights_TK = softmax_top_k(
                logits_TE,
                self.top_k,
                normalize=routing.normalize,
                round_to=self._round_to(logits_TE),
            )
            return RoutedTokens(x_TD, ids_TK, weights_TK)
        if routing.score == "sparsemixer":
            return RoutedTokens(x_TD, *sparsemixer(logits_TE, routing.jitter, self.top_k))
        limit = GroupLimit(routing.groups, routing.kept_groups, routing.best_of_group)
        ids_TK, weights_TK = limited_top_k(
            self._scored(logits_TE),
            self.top_k,
            limit,
            bias_E=self._correction,
            normalize=routing.normalize,
        )
        return RoutedTokens(x_TD, ids_TK, weights_TK.mul_(routing.scale))

    def weigh(self, x_TD: Tensor, ids_TK: Tensor) -> RoutedTokens:
        """Return given experts with their router weights for x_TD."""
        logits_TE, routing = self.logits(x_TD), self._routing
        if self._plain:
            weights_TK = softmax_weights(
                logits_TE, ids_TK, normalize=routing.normalize, round_to=self._round_to(logits_TE)
            )
            return RoutedTokens(x_TD, ids_TK, weights_TK)
        if routing.score == "sparsemixer":
            weights_TK = sparsemixer_weights(logits_TE, ids_TK, routing.jitter)
            return RoutedTokens(x_TD, ids_TK, weights_TK)
        scores_TE = self._scored(logits_TE)
        weights_TK = score_weights(scores_TE, ids_TK, normalize=routing.normalize)
        return self._applied(RoutedTokens(x_TD, ids_TK, weights_TK.mul_(routing.scale)))

    def _scored(self, logits_TE: Tensor) -> Tensor:
        is_sigmoid, logits_TE = self._routing.score == "sigmoid", logits_TE.float()
        return sigmoid(logits_TE) if is_sigmoid else logits_TE.softmax(-1)

    def _round_to(self, logits_TE: Tensor) -> torch.dtype | None:
        return logits_TE.dtype if self._rounds else None
