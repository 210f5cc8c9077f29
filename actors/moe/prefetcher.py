"""Prediction of the experts that the next layer needs, so that they can be prefetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from actors.moe.backend import TaskKey
from models.experts.cache_requests import PredictedExpert
from models.experts.device_lanes import Arrival
from models.experts.expert_half import RoutedTokens
from models.prediction.expert_predictor import DevicePrediction, ExpertPredictor, PredictedRouting

MicroBatchId = tuple[int, int]
"""Batch, micro-batch."""
Hint = Callable[[TaskKey, int, Sequence[PredictedExpert]], None]

_MAX_PREDICTED = 64


class PendingPrediction(NamedTuple):
    """A prediction on the device whose expert ids are being copied to the host."""

    found: DevicePrediction
    ids: Arrival


class ExpertPrefetcher:
    """Passes predictions on as hints. Owned by the computing thread.

    predictor: None: nothing is predicted. hint: receives the predicted experts of a later layer.
    forget: cancels a micro-batch's hints.
    """

    def __init__(
        self,
        predictor: ExpertPredictor | None,
        hint: Hint,
        forget: Callable[[MicroBatchId], None] = lambda owner: None,
    ) -> None:
        self.is_enabled = predictor is not None
        self._predictor, self._hint, self._forget = predictor, hint, forget
        self._predicted: dict[MicroBatchId, list[PredictedRouting]] = {}  # of the next layer

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """Predict for a micro-batch that is about to run."""
        if self._predictor is not None:
            self._pass_on(key, self._predictor.predict_first(token_ids_T))

    def select_routing(self, key: TaskKey, routed: RoutedTokens) -> RoutedTokens:
        """Return the experts that the layer runs: as routed, or as predicted (speculation).

        Call `predict_next` afterwards.
        """
        if self._predictor is None:
            return routed
        known = [each for each in self._predicted.pop(key.owner, ()) if each.layer == key.layer]
        for predicted in known:
            self._predictor.update(predicted, routed.topk_ids_TK)
        is_speculated = key.decodes and self._predictor.is_speculated(key.layer)
        if is_speculated and known and known[0].routed is not None:
            return self._predictor.speculate(known[0], routed)
        return routed

    def predict_next(self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens) -> None:
        """Predict while the layer's experts run. hidden_TD: the residual before them."""
        if self._predictor is not None:
            self._pass_on(key, self._predictor.predict(key.layer, hidden_TD, routed))

    def request_prediction(
        self,
        key: TaskKey,
        hidden_TD: Tensor,
        routed: RoutedTokens,
        fetch: Callable[[Tensor], Arrival],
    ) -> PendingPrediction | None:
        """Replace `predict_next` on a device: predict there and copy the ids with `fetch`.

        Pass the result to `deliver` once it has arrived. None: nothing is predicted.
        """
        if self._predictor is None:
            return None
        found = self._predictor.predict_on_device(key.layer, hidden_TD, routed)
        return None if found is None else PendingPrediction(found, fetch(found.routed.topk_ids_TK))

    def deliver(self, key: TaskKey, prediction: PendingPrediction) -> None:
        """Hint the experts of a prediction that has arrived on the host."""
        assert self._predictor is not None
        ids = prediction.ids.tensor.tolist()
        self._pass_on(key, self._predictor.resolve(prediction.found, ids))

    def drop(self, owner: MicroBatchId) -> None:
        if self._predictor is not None:
            self._predicted.pop(owner, None)
            self._forget(owner)

    def _pass_on(self, key: TaskKey, predicted: PredictedRouting | None) -> None:
        if predicted is None or self._predictor is None:
            return
        self._predicted.setdefault(key.owner, []).append(predicted)
        if len(self._predicted) > _MAX_PREDICTED:  # batches dropped during attention
            self.drop(next(iter(self._predicted)))
        self._hint(key, predicted.layer, self._predictor.experts(predicted))
