"""Routers of MoE layers.

Shapes: T tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.experts import GroupLimit, RoutingRule
from kernels.linear import PackedLinear
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
        self.experts = spec.num_experts
        self.top_k = spec.top_k
        routing = spec.routing
        self.weighs_input = spec.family.weighs_input
        self._rule = RoutingRule(
            spec.num_experts,
            spec.top_k,
            normalize=routing.normalize,
            sigmoid=routing.score == "sigmoid",
            rounds=spec.family.rounds_topk_weights,
            limit=GroupLimit(routing.groups, routing.kept_groups, routing.best_of_group),
            bias_E=None if correction is None else loader.load(correction).flatten(),
            scale=routing.scale,
            jitter=routing.jitter if routing.score == "sparsemixer" else None,
        )

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
        if not self.weighs_input:
            return routed
        x_TD, weights_T1 = routed.x_TD, routed.topk_weights_TK
        return RoutedTokens(
            x_TD * weights_T1.to(x_TD.dtype), routed.topk_ids_TK, torch.ones_like(weights_T1), x_TD
        )

    @property
    def decode_fields(self) -> tuple[int, ...] | None:
        """The router's fields of `attend_layer`, or None."""
        if self._scores.kind is None:
            return None
        rule = self._rule.fields.ctypes.data, self.top_k, self.weighs_input
        return self._scores.kind, *self._scores.addresses, *rule

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return [T, E]."""
        return self._scores(x_TD.to(self._dtype))

    def choose(self, x_TD: Tensor, logits_TE: Tensor) -> RoutedTokens:
        """Return the experts of x_TD and their weights by the family's rule."""
        return RoutedTokens(x_TD, *self._rule.choose(logits_TE))

    def weigh(self, x_TD: Tensor, ids_TK: Tensor) -> RoutedTokens:
        """Return given experts with their router weights for x_TD."""
        weights_TK = self._rule.weigh(self.logits(x_TD), ids_TK)
        return self._applied(RoutedTokens(x_TD, ids_TK, weights_TK))
