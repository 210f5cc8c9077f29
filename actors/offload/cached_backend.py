"""Experts in a cache of host slots; missing ones are read on demand.

    attention │ wait │ cached experts │ … experts that have arrived │ attention
    tier       ══════ missing ════ missing ═══                 ══ hints for the next layer ══

A micro-batch runs each expert as it becomes available and is not ready while none is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.moe.backend import ExpertBackend, TaskKey
from actors.moe.prefetcher import make_prefetcher
from actors.telemetry.telemetry import Timeline
from contracts.clock import Clock
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.experts import ClampedGate
from kernels.routing import group_by_expert, local_index
from kernels.steps import Steps, add_tiled
from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import ExpertRequest, PredictedExpert
from models.experts.cached_sum import CachedSum
from models.experts.expert_cache import ExpertCache
from models.experts.expert_loading import clamped_gate
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor

_WAIT_S = 0.05  # for experts, in a task that continues before any has arrived


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
        clock: Clock,
        predictor: ExpertPredictor | None = None,
    ) -> None:
        self._prefetcher = make_prefetcher(predictor, self._hint, cache.forget_hints)
        self._name = name
        self._cache = cache
        self._timeline = timeline
        self._clock = clock
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
        start_s, before_s = self._clock(), self._cache.traffic.waited_s
        arrived = self._cache.wait(timeout_s)
        end_s = self._clock()
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
