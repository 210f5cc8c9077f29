"""Expert backends of a prefill worker, selected by `prefill.experts`.

With a store (`StoredBackend`), where copying a layer is slower than computing it, the micro-batches
that reached it wait for one copy while others attend. On a GPU a layer is only queued: the host is
one layer ahead, and spans are the host's.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.channels.factory import rank_endpoint
from actors.gather.all_to_all import AllToAll, LockstepBackend
from actors.gather.peer_source import PeerSource, own_part
from actors.gather.weight_shard import PartSource, ResidentShard, Shard, WindowedShard
from actors.moe.backend import ExpertBackend, TaskKey
from actors.offload.cache_factory import device_cache, expert_cache, predictor
from actors.offload.device_backend import CachedBackend, DeviceBackend
from actors.telemetry.telemetry import Telemetry, Timeline
from contracts.clock import Clock, monotonic_s
from contracts.plan import Plan
from contracts.ranks import Group, RankSpec, rank_name
from contracts.traces import Stage, TaskSpan
from kernels.device import LaunchLimiter
from kernels.routing import local_index
from kernels.steps import Steps, add_tiled
from models.decoder.attention import KvPool
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import LayerDecoder, ResidentLayerDecoder
from models.experts.copying_store import CopyingStore, split_layers
from models.experts.expert_half import ExpertHalf, add_expert_sums
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertSource, ExpertStore, ResidentStore
from models.experts.host_experts import CheckpointParts, HostSource, open_host_source
from models.experts.router import RoutedTokens
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import progress_line
from planner.placement.slots import check_fits

_LAYERS_AHEAD = 1  # on a GPU: queued work cannot be overtaken


class StoredPending:
    """Rows whose experts are computed once the store has their layer."""

    __slots__ = ("_store", "key", "routed")

    def __init__(self, key: TaskKey, routed: RoutedTokens, store: ExpertStore) -> None:
        self.key = key
        self.routed = routed
        self._store = store

    @property
    def is_complete(self) -> bool:
        return self._store.is_ready(self.key.layer)


class StoredBackend(ExpertBackend[StoredPending]):
    """Expert backend over a store. A failing store ends the worker. name: for spans."""

    def __init__(
        self, name: str, half: AttentionHalf, store: ExpertStore, timeline: Timeline, clock: Clock
    ) -> None:
        self._name = name
        self._half = half
        self._store = store
        self._timeline = timeline
        self._clock = clock
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
        start_s = self._clock()
        arrived = self._store.wait_ready(first.key.layer, timeout_s)
        self._note_exposed(first, start_s)
        return arrived

    @property
    def yields(self) -> bool:
        """True if the layers stay resident, so that others may run between steps."""
        return not self._store.is_streamed

    @property
    def copy_s(self) -> float:
        return self._store.copy_s

    def combine(
        self, hidden_TD: Tensor, pending: StoredPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        start_s, layer = self._clock(), pending.key.layer
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
        end_s = self._clock()
        self._timeline.add(
            TaskSpan(
                self._name,
                Stage.WAIT,
                start_s,
                end_s,
                key.batch,
                key.layer,
                key.micro_batch,
                tokens=tokens,
            )
        )


def _no_bytes() -> tuple[int, int]:
    return 0, 0


class ExpertSupply(NamedTuple):
    """The expert backend of a prefill worker and what it owns.

    address: where peers reach this worker, "" if nowhere. unwritten_bytes: memory that is reserved
    and not filled yet. degraded: why experts do not come from their usual place, "" if they do.
    bytes_moved: sent to and received from other workers so far. connect: joins other workers (name
    -> address), called again with all of them after a replacement; raises ChannelError. close: may
    be called twice.
    """

    backend: Callable[[AttentionHalf], ExpertBackend[Any]]
    close: Callable[[], None]
    unwritten_bytes: int = 0
    address: str = ""
    degraded: Callable[[], str] = str
    bytes_moved: Callable[[], tuple[int, int]] = _no_bytes
    connect: Callable[[dict[str, str]], None] = lambda addresses: None


def expert_supply(
    spec: RankSpec, model: ModelSpec, dtype: torch.dtype, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """Build what `prefill.experts` selects. Raises CheckpointError, ResourceError, ConfigError."""
    kind = spec.config.prefill.experts
    if kind == "resident":
        store: ExpertStore = ResidentStore(_load(spec, model, dtype, model.moe_layers))
        return _stored(spec, store, timeline)
    if kind == "all_to_all":
        return _lockstep(spec, model, dtype, timeline, telemetry)
    layout = ExpertLayout(
        model, dtype, torch.device(spec.device), packed=spec.config.prefill.packed_experts
    )
    if kind == "cached":
        return cached_supply(spec, layout, timeline, telemetry)
    if kind == "streamed":
        store = copying_store(spec, layout, host_source(spec, layout), Stage.HOST_COPY, timeline)
        return _stored(spec, store, timeline)
    host = host_source(spec, layout) if kind == "hybrid" else None
    return _gathered(spec, layout, timeline, host)


def cached_supply(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """Experts that are loaded on demand. Raises CheckpointError, ResourceError, ConfigError."""
    if layout.device.type == "cuda":
        return device_supply(spec, layout, timeline, telemetry)
    cache = expert_cache(spec, layout, telemetry)
    return ExpertSupply(
        lambda half: CachedBackend(
            spec.name, half, cache, timeline, monotonic_s, predictor(spec, half)
        ),
        cache.close,
        cache.num_bytes,
    )


def device_supply(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """`cached_supply` in device memory, which is allocated at once."""
    held, deadline_s = device_cache(spec, layout, telemetry), spec.config.channel.connect_timeout_s
    return ExpertSupply(
        lambda half: DeviceBackend(
            spec.name,
            half,
            held,
            timeline,
            monotonic_s,
            predictor(spec, half),
            deadline_s=deadline_s,
        ),
        held.close,
    )


def _stored(spec: RankSpec, store: ExpertStore, timeline: Timeline) -> ExpertSupply:
    return ExpertSupply(
        lambda half: StoredBackend(spec.name, half, store, timeline, monotonic_s), store.close
    )


def _gathered(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, host: PartSource | None
) -> ExpertSupply:
    """Gathered and hybrid mode.

    host: fills a window of the shard, and replaces lost peers. None: the whole shard is read now,
    from the checkpoint.
    """
    model = layout.spec
    check_fits(spec.placement, spec.prefill_ranks, model.num_experts, model.moe_layers)
    _, layers = split_layers(model, spec.config.prefill.resident_layers)
    part = own_part(spec, layout)
    shard: Shard
    if host is None:
        host = CheckpointParts(Checkpoint(Path(spec.model_folder)), layout)
        shard = ResidentShard(layers, part, host)
    else:
        shard = WindowedShard(layers, part, host, spec.config.prefill.shard_prefetch_layers)
    source = PeerSource(spec, part, shard, host)
    address = source.listen(spec.host)
    store = copying_store(spec, layout, source, Stage.GATHER, timeline)
    return _stored(spec, store, timeline)._replace(
        address=address,
        degraded=lambda: "; ".join(source.lost.values()),
        bytes_moved=source.bytes_moved,
        connect=source.connect,
    )


def _lockstep(
    spec: RankSpec, model: ModelSpec, dtype: torch.dtype, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """All-to-all mode: each worker has a share of the experts. A lost worker restarts the group."""
    workers = [rank_name(Group.PREFILL, rank) for rank in range(spec.prefill_ranks)]
    device = torch.device(spec.device)
    check_fits(spec.placement, len(workers), model.num_experts, model.moe_layers)
    experts = ExpertHalf.load(
        Checkpoint(Path(spec.model_folder)),
        model,
        spec.own_experts,
        dtype=dtype,
        device=device,
        progress=progress_line(spec.name, sys.stderr),
        keeps_stored=spec.config.experts.keeps_stored,
    )
    endpoint = rank_endpoint(spec, device, monotonic_s)
    address = endpoint.listen(spec.host)
    all_to_all = AllToAll(endpoint, workers, experts, spec.placement, timeline, monotonic_s)
    all_to_all.counts.show(telemetry, spec.name)
    return ExpertSupply(
        lambda half: LockstepBackend(half, all_to_all),
        endpoint.close,
        address=address,
        bytes_moved=endpoint.bytes_moved,
        connect=all_to_all.connect,
    )


def host_source(spec: RankSpec, layout: ExpertLayout) -> HostSource:
    """Open the complete expert set of the node. Raises CheckpointError, ResourceError."""
    where = spec.config.prefill.host_store
    return open_host_source(
        Path(spec.model_folder),
        layout,
        store=None if where is None else Path(where),
        deadline_s=spec.config.groups.ready_timeout_s,
    )


def copying_store(
    spec: RankSpec, layout: ExpertLayout, source: ExpertSource, stage: Stage, timeline: Timeline
) -> CopyingStore:
    """Keep the first `prefill.resident_layers` layers; copy the others from `source`."""
    resident, _ = split_layers(layout.spec, spec.config.prefill.resident_layers)
    half = _load(spec, layout.spec, layout.dtype, resident)
    resource = f"experts>{spec.name}"
    return CopyingStore(
        source,
        {layer: half.layer_experts(layer) for layer in resident},
        layout,
        deadline_s=spec.config.channel.connect_timeout_s,
        observe=lambda layer, start_s, end_s: timeline.add(
            TaskSpan(resource, stage, start_s, end_s, layer=layer)
        ),
    )


def _load(
    spec: RankSpec, model: ModelSpec, dtype: torch.dtype, layers: Sequence[int]
) -> ExpertHalf:
    return ExpertHalf.load(
        Checkpoint(Path(spec.model_folder)),
        model,
        range(model.num_experts),
        dtype=dtype,
        device=torch.device(spec.device),
        progress=progress_line(spec.name, sys.stderr),
        layers=layers,
        keeps_stored=spec.config.experts.keeps_stored,
    )
