"""Which experts each token of a layer goes to.

Shapes: T tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kernels.linear import Linear
from kernels.routing import GroupLimit, limited_top_k, softmax_top_k
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.loading import Loader


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """What the experts must see: x_TD in the model dtype, ids int64, weights float32."""

    x_TD: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor


class Router:
    """The router of one layer."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        wants = layout.router_tensors(spec, layer)
        router = loader.load(wants["router"])
        self._dtype = router.dtype
        self._scores = Linear(router, loader.load(wants["bias"]) if "bias" in wants else None)
        self._correction = loader.load(wants["correction"]) if "correction" in wants else None
        self.experts = spec.num_experts
        self._top_k = spec.top_k
        self._routing = spec.routing
        self._plain = spec.family.routing == "plain"
        self._rounds = spec.family.rounds_topk_weights

    def __call__(self, x_TD: Tensor) -> Routed:
        return self.choose(x_TD, self.logits(x_TD))

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E]"""
        return self._scores(x_TD.to(self._dtype))

    def choose(self, x_TD: Tensor, logits_TE: Tensor) -> Routed:
        """The experts of x_TD and their weights, by the family's rule."""
        routing = self._routing
        if self._plain:
            round_to = logits_TE.dtype if self._rounds else None
            ids_TK, weights_TK = softmax_top_k(
                logits_TE, self._top_k, normalize=routing.normalize, round_to=round_to
            )
            return Routed(x_TD, ids_TK, weights_TK)
        scores_TE = logits_TE.sigmoid() if routing.score == "sigmoid" else logits_TE.softmax(-1)
        limit = GroupLimit(routing.groups, routing.kept_groups, routing.best_of_group)
        ids_TK, weights_TK = limited_top_k(
            scores_TE, self._top_k, limit, bias_E=self._correction, normalize=routing.normalize
        )
        return Routed(x_TD, ids_TK, weights_TK.mul_(routing.scale))
