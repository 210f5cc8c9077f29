"""What the next layer may want, told to whoever can read it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from actors.moe.backend import TaskKey
from contracts.clock import Clock
from models.experts.cache_requests import PredictedExpert
from models.experts.device_lanes import Arrival
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import DevicePrediction, ExpertPredictor, PredictedRouting
from planner.scheduling.prefetch_trial import PrefetchTrial

MicroBatchId = tuple[int, int]
"""Batch, micro-batch."""

_MAX_PREDICTED = 64


class PendingPrediction(NamedTuple):
    """What is foretold, with its ids on their way to the host."""

    found: DevicePrediction
    ids: Arrival


class ExpertPrefetcher:
    """Owned by the thread that computes."""

    def __init__(
        self,
        predictor: ExpertPredictor,
        hint: Callable[[TaskKey, int, Sequence[PredictedExpert]], None],
        forget: Callable[[MicroBatchId], None] = lambda owner: None,
        *,
        experts_s: Callable[[], float],
        clock: Clock,
    ) -> None:
        """hint: told what a micro-batch may want of a later layer; forget: that it wants nothing
        more. experts_s: what experts that were not there have cost so far: nothing is foretold
        while that costs more than it saves."""
        self._predictor, self._hint, self._forget = predictor, hint, forget
        self._experts_s, self._clock = experts_s, clock
        self._trial = None if predictor.speculates else PrefetchTrial()
        self.spent_s = 0.0  # for guesses, so far
        self._cost_s = 0.0  # for experts and guesses, at the last start
        self._was_usual = False
        self._predicted: dict[
            MicroBatchId, list[PredictedRouting]
        ] = {}  # of the layer that comes next

    def __len__(self) -> int:
        """Micro-batches that something is foretold of."""
        return len(self._predicted)

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """A micro-batch is about to run."""
        if self._trial is not None:
            self._weigh(self._trial, is_usual=key.decodes)
        self._predict_and_hint(key, self._predictor.predict_first, token_ids_T)

    def _weigh(self, trial: PrefetchTrial, *, is_usual: bool) -> None:
        """is_usual: not of a prompt, which would not compare."""
        cost_s = self._experts_s() + self.spent_s
        if is_usual and self._was_usual:
            trial.record_pass(cost_s - self._cost_s)
        self._cost_s, self._was_usual = cost_s, is_usual

    def select_routing(self, key: TaskKey, routed: RoutedTokens) -> RoutedTokens:
        """The experts that its layer runs: as they were routed, or as they were foretold. Then call
        `predict_next`."""
        known = [each for each in self._predicted.pop(key.owner, ()) if each.layer == key.layer]
        for predicted in known:
            predicted.update(routed.topk_ids_TK)
        is_speculated = key.decodes and self._predictor.is_speculated(key.layer)
        if is_speculated and known and known[0].routed is not None:
            return self._predictor.speculate(known[0], routed)
        return routed

    def predict_next(self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens) -> None:
        """They begin; hidden_TD: the residual before them."""
        self._predict_and_hint(key, self._predictor.predict, key.layer, hidden_TD, routed)

    def request_prediction(
        self,
        key: TaskKey,
        hidden_TD: Tensor,
        routed: RoutedTokens,
        fetch: Callable[[Tensor], Arrival],
    ) -> PendingPrediction | None:
        """In the place of `predict_next`, on a device: what is foretold comes to the host by
        `fetch`; then call `deliver`. None: nothing is."""
        if self._trial is not None and not self._trial.enabled:
            return None
        start_s = self._clock()
        found = self._predictor.predict_on_device(key.layer, hidden_TD, routed)
        prediction = (
            None if found is None else PendingPrediction(found, fetch(found.routed.topk_ids_TK))
        )
        self.spent_s += self._clock() - start_s
        return prediction

    def deliver(self, key: TaskKey, prediction: PendingPrediction) -> None:
        """It has come."""
        start_s = self._clock()
        self._pass_on(
            key, self._predictor.resolve(prediction.found, prediction.ids.tensor.tolist())
        )
        self.spent_s += self._clock() - start_s

    def end_layer(self, key: TaskKey, hidden_TD: Tensor) -> None:
        """They have been added."""
        self._predict_and_hint(key, self._predictor.predict_after, key.layer, hidden_TD)

    def drop(self, owner: MicroBatchId) -> None:
        self._predicted.pop(owner, None)
        self._forget(owner)

    def _predict_and_hint(
        self, key: TaskKey, predict_layer: Callable[..., PredictedRouting | None], *seen: Any
    ) -> None:
        if self._trial is not None and not self._trial.enabled:
            return
        start_s = self._clock()
        predicted = predict_layer(*seen)
        if predicted is not None:
            self._pass_on(key, predicted)
        self.spent_s += self._clock() - start_s

    def _pass_on(self, key: TaskKey, predicted: PredictedRouting) -> None:
        self._predicted.setdefault(key.owner, []).append(predicted)
        if (
            len(self._predicted) > _MAX_PREDICTED
        ):  # of batches that were dropped while they attended
            self.drop(next(iter(self._predicted)))
        self._hint(key, predicted.layer, predicted.predicted_experts)
