"""Prediction of the next layer's experts while the current ones are computed.

    tokens ──> attention 0 ──> experts 0 ──> attention 1 ──> experts 1 ──> …
        └ first ───────────────^   └ before ───────────────────^
        (models/prediction/routing_profile.py)

With a profile, each layer uses its most precise kind of prediction (Speculating Experts, Section
6.3's hybrid).
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final, Literal, NamedTuple

from torch import Tensor

from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import PredictedExpert
from models.experts.expert_half import RoutedTokens
from models.prediction.routing_profile import (
    PREDICTOR_KINDS,
    TOKEN,
    PredictorKind,
    RoutingProfile,
    predict_routing,
)

Ids = list[list[int]]
"""[T][K] experts of each token, the most likely one first."""

MAX_ROWS: Final = 64  # of a batch; larger batches need most experts anyway
INITIAL_PRECISION: Final = 0.5  # without measurements
MIN_GAIN: Final = 0.02  # minimum advantage of a more expensive kind
_NEWEST: Final = 0.02  # weight of a new measurement in a running mean


class PredictedRouting(NamedTuple):
    """Prediction for a layer. routed: full routing of all rows, if known."""

    layer: int
    ids: Ids
    routed: RoutedTokens | None = None


class DevicePrediction(NamedTuple):
    """Predicted routing on its device. is_whole: of all rows."""

    layer: int
    routed: RoutedTokens
    is_whole: bool


class Speculation(NamedTuple):
    """Execution of predicted experts (Speculating Experts, Algorithm 1).

    layers: None: all predicted layers. weights: from the layer's own router, or predicted (the
    paper's way).
    """

    layers: frozenset[int] | None = None
    weights: Literal["router", "predicted"] = "router"


class ExpertPredictor:
    """Predictor of experts. Single-threaded."""

    def __init__(
        self,
        half: AttentionHalf,
        profile: RoutingProfile | None,
        kind: PredictorKind | None = None,
        *,
        speculation: Speculation | None = None,
    ) -> None:
        """kind: None: the most precise one at each layer. speculation: None: routers' choice."""
        self._half, self._profile, self._speculation = half, profile, speculation
        spec = half.spec
        self._next_of = dict(zip(spec.moe_layers, spec.moe_layers[1:], strict=False))
        self._kind_of = {
            following: kind or _best_kind(profile, following)
            for following in self._next_of.values()
        }
        self._first = spec.moe_layers[0]
        # By layer and rank: initially from the profile, then measured
        self.precision = {
            layer: self._known(layer, kind)
            for layer, kind in {self._first: TOKEN, **self._kind_of}.items()
        }

    def _known(self, layer: int, kind: str) -> list[float]:
        if self._profile is None:
            return [INITIAL_PRECISION] * self._half.spec.top_k
        known: list[float] = self._profile.precision[kind][layer].tolist()
        return known

    def predict_first(self, token_ids_T: Tensor) -> PredictedRouting | None:
        """Predict the first MoE layer of a new batch."""
        if self._profile is None:
            return None
        ids: Ids = self._profile.tokens_VK[subsample(token_ids_T)].tolist()
        return PredictedRouting(self._first, ids)

    def predict(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> PredictedRouting | None:
        """Predict the MoE layer after `layer`, from a subsample of hidden_TD before its experts."""
        found = self.predict_on_device(layer, hidden_TD, routed)
        return None if found is None else self.resolve(found, found.routed.topk_ids_TK.tolist())

    def predict_on_device(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        """Predict as `predict`, without waiting for a device."""
        following = self._next_of.get(layer)
        if following is None:
            return None
        is_whole = len(hidden_TD) <= MAX_ROWS
        if not is_whole:
            hidden_TD = subsample(hidden_TD)
            ids_TK, weights_TK = subsample(routed.topk_ids_TK), subsample(routed.topk_weights_TK)
            routed = RoutedTokens(subsample(routed.router_input), ids_TK, weights_TK)
        kind = self._kind_of[following]
        found = predict_routing(
            self._half, self._profile, kind, layer, following, hidden_TD, routed
        )
        return DevicePrediction(following, found, is_whole)

    def resolve(self, found: DevicePrediction, ids: Ids) -> PredictedRouting:
        """Return the prediction from `found` and its ids on the host."""
        return PredictedRouting(found.layer, ids, found.routed if found.is_whole else None)

    def experts(self, predicted: PredictedRouting) -> list[PredictedExpert]:
        """Return experts with the probability that some token needs them, the likeliest first."""
        doubts: dict[int, float] = {}
        for ids in predicted.ids:
            for expert, precision in zip(ids, self.precision[predicted.layer], strict=True):
                doubts[expert] = doubts.get(expert, 1.0) * (1.0 - precision)
        return [
            PredictedExpert(e, 1.0 - doubt)
            for e, doubt in sorted(doubts.items(), key=itemgetter(1))
        ]

    def update(self, predicted: PredictedRouting, ids_TK: Tensor) -> None:
        """Measure the precision from the layer's actual experts, if all its rows were computed."""
        actual: Ids = subsample(ids_TK).tolist()
        if len(actual) != len(predicted.ids):
            return
        means = self.precision[predicted.layer]
        for rank in range(len(means)):
            right = sum(
                guess[rank] in ids for guess, ids in zip(predicted.ids, actual, strict=True)
            ) / len(actual)
            means[rank] += _NEWEST * (right - means[rank])

    def is_speculated(self, layer: int) -> bool:
        """Return whether that layer runs predicted experts."""
        speculation = self._speculation
        return speculation is not None and (
            speculation.layers is None or layer in speculation.layers
        )

    def speculate(self, predicted_routing: PredictedRouting, routed: RoutedTokens) -> RoutedTokens:
        """Return the predicted experts instead of the router's choice."""
        assert self._speculation is not None
        assert predicted_routing.routed is not None
        predicted = predicted_routing.routed
        if self._speculation.weights == "predicted":
            return RoutedTokens(routed.x_TD, predicted.topk_ids_TK, predicted.topk_weights_TK)
        router = self._half.router(predicted_routing.layer)
        assert router is not None
        return router.weigh(routed.router_input, predicted.topk_ids_TK)


def subsample(rows_T: Tensor) -> Tensor:
    """Return at most MAX_ROWS evenly spaced rows."""
    return rows_T[:: -(-len(rows_T) // MAX_ROWS)] if len(rows_T) > MAX_ROWS else rows_T


def _best_kind(profile: RoutingProfile | None, layer: int) -> PredictorKind:
    best: PredictorKind = PREDICTOR_KINDS[0]
    if profile is None:
        return best
    for kind in PREDICTOR_KINDS[1:]:
        mean = {k: float(profile.precision[k][layer].mean()) for k in (best, kind)}
        if mean[kind] > mean[best] + MIN_GAIN:
            best = kind
    return best
