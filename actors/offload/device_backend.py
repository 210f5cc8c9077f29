"""Experts in slots on a GPU, as many as there are slots for; the others are copied from the host's
memory when they are wanted, or a layer ahead.

    host     attention 1 │ ids 1? │ want, hint, experts 1 │ attention 2 │ ids 2? …     queues, and
    compute  … attend 1 │ experts there │ (waits) the others │ attend 2 │ …            waits for ids
    copies          hints for 1 ══ │ ═ missing of 1 ═ │ ══ hints for 2 ══              alone

What few tokens want, and is there, is computed before the host knows what they want: it does not
stand still while the host looks. What is missing the compute waits for, not the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from actors.moe.backend import TaskKey
from actors.moe.prefetcher import ExpertPrefetcher, PendingPrediction
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.steps import Steps
from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import AcquiredExpert, ExpertRequest, PredictedExpert
from models.experts.device_lanes import Arrival, DeviceLane
from models.experts.device_sum import DeviceSum, device_sum
from models.experts.device_tier import DeviceSlots, DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor, subsample

_WAIT_S = 0.05  # for slots, where a task is gone on with although none is to be had
_SPIN_S = 2e-4  # ids come within some microseconds as a rule
_NAP_S = 5e-5


class DeviceCache:
    """What a plane computes with."""

    def __init__(
        self,
        cache: ExpertCache,
        slots: DeviceSlots,
        tier: DeviceTier,
        lane: DeviceLane,
        close_host: Callable[[], None] = lambda: None,
    ) -> None:
        """slots: those of `cache`. close_host: of the memory that they are filled from."""
        self.cache, self.slots, self.tier, self.lane = cache, slots, tier, lane
        self._close_host = close_host

    def close(self) -> None:
        """May be called twice."""
        self.cache.close()
        self._close_host()


class DevicePending:
    """A micro-batch whose ids are on their way to the host, and then its experts to the device."""

    def __init__(
        self, key: TaskKey, routed: RoutedTokens, ids: Arrival, device_sum: DeviceSum
    ) -> None:
        self.key, self.routed, self.ids, self.sum = key, routed, ids, device_sum
        self.resident = frozenset(device_sum.begin())
        self.prediction: PendingPrediction | None = None
        self.request: ExpertRequest | None = None
        self.since_s = 0.0

    @property
    def is_complete(self) -> bool:
        return self.ids.is_ready if self.request is None else self.request.is_ready


class DeviceBackend:
    """name: of the worker, for its spans. A device that gives nothing for `deadline_s` ends the
    worker."""

    fatal = ChannelError
    stage = Stage.EXPERT
    is_engaged = False
    yields = interleaves = True

    def __init__(
        self,
        name: str,
        half: AttentionHalf,
        held: DeviceCache,
        timeline: Timeline,
        clock: Clock,
        predictor: ExpertPredictor | None = None,
        *,
        deadline_s: float,
    ) -> None:
        """foresight: None: nothing is copied ahead."""
        self._name, self._half, self._held = name, half, held
        self._cache, self._lane = held.cache, held.lane
        self._timeline, self._clock, self._deadline_s = timeline, clock, deadline_s
        self._ahead: ExpertPrefetcher | None = None
        if predictor is not None:
            self._ahead = ExpertPrefetcher(
                predictor,
                self._hint,
                self._cache.forget_hints,
                experts_s=lambda: self._cache.traffic.cost_s,
                clock=clock,
            )
        self._pending: list[DevicePending] = []
        self._exposed_s = 0.0  # by the lane's account, as far as it was noted
        self._woken = threading.Event()
        self.copy_s = 0.0  # of a whole layer: none is copied

    def wake(self) -> None:
        self._woken.set()
        self._cache.wake()

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        if self._ahead is not None:
            ids = self._lane.fetch(subsample(token_ids_T))
            self._wait_for(ids, self._clock(), "token ids of a batch")
            self._ahead.prepare(key, ids.tensor)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> DevicePending:
        ids = self._lane.fetch(routed.topk_ids_TK)
        prediction = None
        if self._ahead is not None:
            prediction = self._ahead.request_prediction(key, hidden_TD, routed, self._lane.fetch)
        held = self._held
        pairs_sum = device_sum(routed, key.layer, held.slots.layer, held.tier, held.lane)
        pending = DevicePending(key, routed, ids, pairs_sum)
        pending.prediction, pending.since_s = prediction, self._clock()
        self._pending.append(pending)
        self._cache.wait(0.0)  # hints go on
        return pending

    def _hint(self, key: TaskKey, layer: int, guesses: Sequence[PredictedExpert]) -> None:
        self._cache.hint(key.owner, layer, guesses)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0:
            return False  # what has come is complete without
        waiting = [each for each in self._pending if each.request is None]
        if not waiting:
            return self._cache.wait(timeout_s)
        first = min(waiting, key=lambda each: each.since_s)
        start_s = self._clock()
        arrived = self._wait_until(
            lambda: any(each.is_complete for each in self._pending), timeout_s
        )
        end_s = self._clock()
        self._timeline.add(TaskSpan(self._name, Stage.WAIT, start_s, end_s))
        if not arrived:
            self._check(first.since_s, f"ids of layer {first.key.layer}")
        return arrived

    def combine(
        self, hidden_TD: Tensor, pending: DevicePending, shared_TD: Tensor | None
    ) -> Steps[None]:
        request = pending.request = self._acquire_experts(pending)
        if pending.prediction is not None and pending.prediction.ids.is_ready:
            self._prefetch(pending)
        yield
        while request.left:
            acquired = self._cache.acquire_ready(request)
            if acquired:
                pending.sum.compute(acquired)
                self._cache.done(request, acquired)
            else:
                self._cache.wait(_WAIT_S)
            yield
        hidden_TD.add_(pending.sum.result())
        self._pending.remove(pending)
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)
        self._prefetch(pending)
        self._note_exposed()

    def drop(self, pending: DevicePending) -> None:
        self._pending.remove(pending)
        if pending.request is not None:
            self._cache.drop(pending.request)
        if self._ahead is not None:
            self._ahead.drop(pending.key.owner)

    def _acquire_experts(self, pending: DevicePending) -> ExpertRequest:
        """Its ids have come, or are waited for: what is missing is on its way."""
        key, routed = pending.key, pending.routed
        self._wait_for(pending.ids, pending.since_s, f"ids of layer {key.layer}")
        ids_TK = pending.ids.tensor
        if self._ahead is not None:
            self._ahead.select_routing(
                key, RoutedTokens(routed.x_TD, ids_TK, routed.topk_weights_TK)
            )
        cache, resident = self._cache, pending.resident
        requested = pending.sum.requested(ids_TK)
        experts = [e for e in requested if e not in resident or cache.holds(key.layer, e)]
        request = cache.request(key.layer, experts, key.priority, key.owner)
        cache.done(request, [AcquiredExpert(e, 0) for e in experts if e in resident])
        return request

    def _prefetch(self, pending: DevicePending) -> None:
        """What the next layer may want is copied, behind what this one wants; once."""
        prediction, pending.prediction = pending.prediction, None
        if self._ahead is None or prediction is None:
            return
        self._wait_for(prediction.ids, self._clock(), "what is foretold")
        self._ahead.deliver(pending.key, prediction)
        self._cache.wait(0.0)  # begins

    def _wait_for(self, ids: Arrival, since_s: float, what: str) -> None:
        while not self._wait_until(lambda: ids.is_ready, _WAIT_S):
            self._check(since_s, what)

    def _wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Until it has, or a `wake`, at most so long. The device tells nobody: it is looked for,
        without a pause at first."""
        start_s = self._clock()
        while not is_ready():
            spent_s = self._clock() - start_s
            if spent_s >= timeout_s:
                return False
            if spent_s > _SPIN_S and self._woken.wait(_NAP_S):
                self._woken.clear()
                return is_ready()
        return True

    def _check(self, since_s: float, what: str) -> None:
        waited_s = self._clock() - since_s
        if waited_s > self._deadline_s:
            raise ChannelError(
                f"{what} have not come from {self._half.device} for {waited_s:.1f} s; see "
                f"channel.connect_timeout_s={self._deadline_s:g}"
            )

    def _note_exposed(self) -> None:
        """A device tells some layers later."""
        exposed_s = self._lane.exposed_s
        self._timeline.exposed_s += exposed_s - self._exposed_s
        self._cache.traffic.waited_s += exposed_s - self._exposed_s
        self._exposed_s = exposed_s
