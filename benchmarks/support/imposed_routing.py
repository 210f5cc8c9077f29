"""Routing that is imposed on a model with random weights, whose own says nothing: which experts a
token goes to, and what is foretold of them, right so and so often."""

import torch
from torch import Tensor

from kernels.experts import RoutingRule
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import RoutedTokens
from models.prediction.expert_predictor import DevicePrediction, ExpertPredictor
from models.spec.model import ModelSpec


class ImposedRouting:
    """Of one sequence's steps. ids_SLK: each layer's experts, drawn evenly, so that the last step's
    are as likely as any others: the least that a cache can hit. same: the first step's, always."""

    def __init__(
        self, spec: ModelSpec, steps: int, seed: int, device: torch.device, *, same: bool = False
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._spec, self._at = spec, {layer: n for n, layer in enumerate(spec.moe_layers)}
        self.ids_SLK = self._drawn(steps)
        if same:
            self.ids_SLK = self.ids_SLK[:1].expand(steps, -1, -1).contiguous()
        self._device_SLK = self.ids_SLK.to(device)
        self._rule = RoutingRule(spec.num_experts, spec.top_k, normalize=True)

    def routed(self, step: int, layer: int, own: RoutedTokens, logits_TE: Tensor) -> RoutedTokens:
        """In the place of what the layer's router has chosen; with the weights that it gives."""
        ids_TK = self._device_SLK[step, self._at[layer]].unsqueeze(0)
        return RoutedTokens(own.x_TD, ids_TK, self._rule.weigh(logits_TE, ids_TK))

    def predicted_routing(self, precision: float, device: torch.device) -> Tensor:
        """[S, L, K]: each right one with that probability, else one that is not wanted."""
        wrong_SLK = (self.ids_SLK + self._drawn(1)[0, 0, 0] + 1) % self._spec.num_experts
        hits_SLKK = wrong_SLK.unsqueeze(3) == self.ids_SLK.unsqueeze(2)
        while bool(hits_SLKK.any()):
            wrong_SLK = torch.where(
                hits_SLKK.any(3), (wrong_SLK + 1) % self._spec.num_experts, wrong_SLK
            )
            hits_SLKK = wrong_SLK.unsqueeze(3) == self.ids_SLK.unsqueeze(2)
        is_right = torch.rand(self.ids_SLK.shape, generator=self._generator) < precision
        return torch.where(is_right, self.ids_SLK, wrong_SLK).to(device)

    def _drawn(self, steps: int) -> Tensor:
        experts, top_k = self._spec.num_experts, self._spec.top_k
        shape = (steps, len(self._at), experts)
        return torch.rand(shape, generator=self._generator).topk(top_k, dim=-1).indices


class ImposedPredictor(ExpertPredictor):
    """Predicts the imposed experts with the imposed precision as confidence. The next router still
    runs, so that a prediction takes its usual time."""

    def __init__(self, half: AttentionHalf, precision: float) -> None:
        super().__init__(half, None, "router")
        self.imposed = precision
        self.precision = {layer: [precision] * half.spec.top_k for layer in self.precision}
        self._at = {layer: n for n, layer in enumerate(half.spec.moe_layers)}
        self.step, self.ids_SLK = 0, torch.empty(0)

    def predict_first(self, token_ids_T: Tensor) -> None:
        """Nothing is known of the first layer."""

    def predict_on_device(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        found = super().predict_on_device(layer, hidden_TD, routed)
        if found is None:
            return None
        ids_TK = self.ids_SLK[self.step, self._at[found.layer]].unsqueeze(0)
        predicted = RoutedTokens(routed.x_TD, ids_TK, found.routed.topk_weights_TK)
        return DevicePrediction(found.layer, predicted, found.is_whole)
