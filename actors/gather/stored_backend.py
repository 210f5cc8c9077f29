"""Expert backend of a prefill worker over a store.

Where copying a layer is slower than computing it, the micro-batches that reached it wait for one
copy while others attend. On a GPU a layer is only queued: the host is one layer ahead, and spans
are the host's.
"""

import threading
from dataclasses import dataclass

from torch import Tensor

from actors.moe.backend import ExpertBackend, TaskKey
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from kernels.device import LaunchLimiter
from kernels.experts import local_index
from kernels.steps import Steps, add_tiled
from models.decoder.attention import KvPool
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import LayerDecoder, ResidentLayerDecoder
from models.experts.copying_store import CopyingStore
from models.experts.expert_half import RoutedTokens, add_expert_sums

_LAYERS_AHEAD = 1  # on a GPU: queued work cannot be overtaken


@dataclass(slots=True, eq=False)
class StoredPending:
    """Rows whose experts are computed once the store has their layer."""

    key: TaskKey
    routed: RoutedTokens
    store: CopyingStore

    @property
    def is_complete(self) -> bool:
        return self.store.is_ready(self.key.layer)


class StoredBackend(ExpertBackend[StoredPending]):
    """Expert backend over a store. A failing store ends the worker. name: for spans."""

    def __init__(
        self, name: str, half: AttentionHalf, store: CopyingStore, timeline: Timeline
    ) -> None:
        self._name = name
        self._half = half
        self._store = store
        self.yields = not store.is_streamed
        self._timeline = timeline
        experts = half.spec.num_experts
        self._local_of_E = local_index(list(range(experts)), experts).to(half.device)
        self._pending: list[StoredPending] = []
        self._waited_s = 0.0  # the store's waiting time recorded so far
        self._pace = LaunchLimiter(half.device, _LAYERS_AHEAD)
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()
        self._store.wake()

    def layer_decoder(self, kv: KvPool) -> LayerDecoder | None:
        half = self._half
        if self._store.is_streamed:
            return None
        experts = {layer: self._store.fetch(layer) for layer in half.spec.moe_layers}
        if not ResidentLayerDecoder.supports(half, experts):
            return None
        return ResidentLayerDecoder(half, experts, self._local_of_E, kv)

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> StoredPending:
        pending = StoredPending(key, routed, self._store)
        self._pending.append(pending)
        return pending

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0:
            return False  # `is_complete` reports finished copies
        if not self._pending:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return False
        first = min(self._pending, key=lambda pending: (pending.key.priority, pending.key.layer))
        start_s = monotonic_s()
        arrived = self._store.wait_ready(first.key.layer, timeout_s)
        self._note_exposed(first, start_s)
        return arrived

    @property
    def copy_s(self) -> float:
        return self._store.copy_s

    def combine(
        self, hidden_TD: Tensor, pending: StoredPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        start_s, layer = monotonic_s(), pending.key.layer
        held = self._store.fetch(layer)
        self._note_exposed(pending, start_s)
        yield from add_expert_sums(hidden_TD, pending.routed, held, self._local_of_E)
        if shared_TD is not None:
            yield from add_tiled(hidden_TD, shared_TD)
        self._pending.remove(pending)
        if not any(other.key.layer == layer for other in self._pending):
            self._store.release()
        self._pace.step()

    def drop(self, pending: StoredPending) -> None:
        self._pending.remove(pending)

    def _note_exposed(self, pending: StoredPending, start_s: float) -> None:
        """Record the time spent waiting for copies since the last call; a GPU reports it later."""
        waited_s = self._store.waited_s
        if waited_s <= self._waited_s:
            return
        self._timeline.exposed_s += waited_s - self._waited_s
        self._waited_s = waited_s
        key, tokens = pending.key, pending.routed.x_TD.shape[0]
        task = key.batch, key.layer, key.micro_batch, 0, tokens
        self._timeline.add(TaskSpan(self._name, Stage.WAIT, start_s, monotonic_s(), *task))
