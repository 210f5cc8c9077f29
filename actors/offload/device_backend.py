"""Experts in a cache of GPU slots; missing ones are copied from host memory.

host     attention 1 │ ids 1? │ request, hint, experts 1 │ attention 2 │ ids 2? …  queues work,
compute  … attend 1 │ cached experts │ (waits) others │ attend 2 │ …               waits for ids
copies          hints for 1 ══ │ ═ missing of 1 ═ │ ══ hints for 2 ══

Cached experts with few tokens are computed before the host knows the routing, so that the device is
not idle meanwhile. The compute queue, not the host, waits for missing experts.

On a CPU (`CachedBackend`), missing experts are read on demand into host slots:

    attention │ wait │ cached experts │ … experts that have arrived │ attention
    tier       ══════ missing ════ missing ═══                 ══ hints for the next layer ══

A micro-batch runs each expert as it becomes available and is not ready while none is.
"""

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from actors.moe.backend import ExpertBackend, ExpertPrefetcher, PendingPrediction, TaskKey
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.experts import ClampedGate, group_by_expert, local_index
from kernels.steps import Steps, add_tiled
from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import AcquiredExpert, ExpertRequest, PredictedExpert
from models.experts.cached_sum import CachedSum
from models.experts.device_lanes import Arrival
from models.experts.device_sum import DeviceSum, device_sum
from models.experts.device_tier import DeviceCache
from models.experts.expert_cache import ExpertCache
from models.experts.expert_half import RoutedTokens
from models.experts.expert_loading import clamped_gate
from models.prediction.expert_predictor import ExpertPredictor, subsample

_WAIT_S = 0.05  # in a task that continues before any expert or slot is there
_SPIN_S = 2e-4  # ids usually arrive within microseconds
_NAP_S = 5e-5


class DevicePending:
    """A micro-batch whose ids are being copied to the host, and then its experts to the device."""

    def __init__(
        self, key: TaskKey, routed: RoutedTokens, ids: Arrival, device_sum: DeviceSum
    ) -> None:
        self.key, self.routed, self.ids, self.sum = key, routed, ids, device_sum
        self.resident = frozenset(device_sum.start())
        self.prediction: PendingPrediction | None = None
        self.request: ExpertRequest | None = None
        self.since_s = 0.0

    @property
    def is_complete(self) -> bool:
        return self.ids.is_ready if self.request is None else self.request.is_ready


class DeviceBackend(ExpertBackend[DevicePending]):
    """Backend over a GPU's expert cache; no progress for deadline_s ends the worker."""

    def __init__(
        self,
        name: str,
        half: AttentionHalf,
        held: DeviceCache,
        timeline: Timeline,
        predictor: ExpertPredictor | None = None,
        *,
        deadline_s: float,
    ) -> None:
        self._name, self._half, self._held = name, half, held
        self._cache, self._lane = held.cache, held.lane
        self._timeline, self._deadline_s = timeline, deadline_s
        self._prefetcher = ExpertPrefetcher(predictor, self._hint, self._cache.forget_hints)
        self._pending: list[DevicePending] = []
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()
        self._cache.wake()

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        if self._prefetcher.is_enabled:
            ids = self._lane.fetch(subsample(token_ids_T))
            self._wait_for(ids, monotonic_s(), "token ids of a batch")
            self._prefetcher.prepare(key, ids.tensor)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> DevicePending:
        ids = self._lane.fetch(routed.topk_ids_TK)
        prediction = self._prefetcher.request_prediction(key, hidden_TD, routed, self._lane.fetch)
        held = self._held
        pairs_sum = device_sum(routed, key.layer, held)
        pending = DevicePending(key, routed, ids, pairs_sum)
        pending.prediction, pending.since_s = prediction, monotonic_s()
        self._pending.append(pending)
        self._cache.wait(0.0)  # starts copies of hints
        return pending

    def _hint(self, key: TaskKey, layer: int, guesses: Sequence[PredictedExpert]) -> None:
        self._cache.hint(key.owner, layer, guesses, key.priority)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0:
            return False  # `is_complete` reports what has arrived
        waiting = [each for each in self._pending if each.request is None]
        if not waiting:
            return self._cache.wait(timeout_s)
        first = min(waiting, key=lambda each: each.since_s)
        start_s = monotonic_s()
        arrived = self._wait_until(
            lambda: any(each.is_complete for each in self._pending), timeout_s
        )
        end_s = monotonic_s()
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
                self._cache.complete(request, acquired)
            else:
                self._cache.wait(_WAIT_S)
            yield
        hidden_TD.add_(pending.sum.result())
        self._pending.remove(pending)
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)
        self._prefetch(pending)
        self._timeline.exposed_s += self._held.count_exposed()

    def drop(self, pending: DevicePending) -> None:
        self._pending.remove(pending)
        if pending.request is not None:
            self._cache.cancel(pending.request)
        self._prefetcher.drop(pending.key.owner)

    def _acquire_experts(self, pending: DevicePending) -> ExpertRequest:
        """Request the experts once the ids are on the host."""
        key, routed = pending.key, pending.routed
        self._wait_for(pending.ids, pending.since_s, f"ids of layer {key.layer}")
        ids_TK = pending.ids.tensor
        on_host = RoutedTokens(routed.x_TD, ids_TK, routed.topk_weights_TK)
        self._prefetcher.select_routing(key, on_host)
        cache, resident = self._cache, pending.resident
        requested = pending.sum.experts_of(ids_TK)
        experts = [e for e in requested if e not in resident or cache.holds(key.layer, e)]
        request = cache.request(key.layer, experts, key.priority, key.owner)
        cache.complete(request, [AcquiredExpert(e, 0) for e in experts if e in resident])
        return request

    def _prefetch(self, pending: DevicePending) -> None:
        """Copy predicted experts of the next layer, after those of this layer; once."""
        prediction, pending.prediction = pending.prediction, None
        if prediction is None:
            return
        self._wait_for(prediction.ids, monotonic_s(), "predicted experts")
        self._prefetcher.deliver(pending.key, prediction)
        self._cache.wait(0.0)  # starts the copies

    def _wait_for(self, ids: Arrival, since_s: float, what: str) -> None:
        while not self._wait_until(lambda: ids.is_ready, _WAIT_S):
            self._check(since_s, what)

    def _wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ready, woken or timed out, by polling: a device sends no notification."""
        start_s = monotonic_s()
        while not is_ready():
            spent_s = monotonic_s() - start_s
            if spent_s >= timeout_s:
                return False
            if spent_s > _SPIN_S and self._woken.wait(_NAP_S):
                self._woken.clear()
                return is_ready()
        return True

    def _check(self, since_s: float, what: str) -> None:
        waited_s = monotonic_s() - since_s
        if waited_s > self._deadline_s:
            raise ChannelError(
                f"{what} have not arrived from {self._half.device} for {waited_s:.1f} s; see "
                f"channel.connect_timeout_s={self._deadline_s:g}"
            )


class CachedPending:
    """The partial sum of a micro-batch whose experts are arriving."""

    def __init__(
        self, key: TaskKey, routed: RoutedTokens, identity_E: Tensor, clamped: ClampedGate | None
    ) -> None:
        self.key = key
        ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
        rows_N, weights_N, counts = group_by_expert(ids_TK, weights_TK, identity_E, len(identity_E))
        pairs = {expert: count for expert, count in enumerate(counts) if count}
        self.sum = CachedSum(routed.x_TD, rows_N, weights_N, pairs, clamped)
        self.request: ExpertRequest

    @property
    def is_complete(self) -> bool:
        return self.request.is_ready


class CachedBackend(ExpertBackend[CachedPending]):
    """Backend over an expert cache. name: of the worker. A failed read ends the worker."""

    def __init__(
        self,
        name: str,
        half: AttentionHalf,
        cache: ExpertCache,
        timeline: Timeline,
        predictor: ExpertPredictor | None = None,
    ) -> None:
        self._prefetcher = ExpertPrefetcher(predictor, self._hint, cache.forget_hints)
        self._name = name
        self._cache = cache
        self._timeline = timeline
        self._clamped = clamped_gate(half.spec)
        experts = half.spec.num_experts
        self._identity_E = local_index(list(range(experts)), experts)
        self._pending: list[CachedPending] = []

    def wake(self) -> None:
        self._cache.wake()

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        self._prefetcher.prepare(key, token_ids_T)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> CachedPending:
        routed = self._prefetcher.select_routing(key, routed)
        pending = CachedPending(key, routed, self._identity_E, self._clamped)
        experts = list(pending.sum.pairs)
        pending.request = self._cache.request(key.layer, experts, key.priority, key.owner)
        self._pending.append(pending)
        self._prefetcher.predict_next(key, hidden_TD, routed)
        return pending

    def _hint(self, key: TaskKey, layer: int, guesses: Sequence[PredictedExpert]) -> None:
        self._cache.hint(key.owner, layer, guesses, key.priority)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0:
            return False  # `is_complete` reports what has arrived
        return self._wait(timeout_s) if self._pending else self._cache.wait(timeout_s)

    def _wait(self, timeout_s: float) -> bool:
        start_s, before_s = monotonic_s(), self._cache.traffic.waited_s
        arrived = self._cache.wait(timeout_s)
        end_s = monotonic_s()
        self._timeline.exposed_s += self._cache.traffic.waited_s - before_s
        self._timeline.add(TaskSpan(self._name, Stage.WAIT, start_s, end_s))
        return arrived

    def combine(
        self, hidden_TD: Tensor, pending: CachedPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        while pending.request.left:
            if not pending.sum.advance(self._cache, pending.request):
                self._wait(_WAIT_S)
            yield
        yield from add_tiled(hidden_TD, pending.sum.out_UD)
        if shared_TD is not None:
            yield from add_tiled(hidden_TD, shared_TD)
        self._pending.remove(pending)

    def drop(self, pending: CachedPending) -> None:
        self._pending.remove(pending)
        self._cache.cancel(pending.request)
        self._prefetcher.drop(pending.key.owner)
