"""Experts that are divided among the prefill workers: their weights travel, or activations do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from actors.channels.factory import rank_endpoint
from actors.gather.all_to_all import AllToAll, LockstepBackend
from actors.gather.peer_source import PeerSource, check_placement, own_part
from actors.gather.stored_backend import StoredBackend
from actors.gather.weight_shard import PartSource, ResidentShard, Shard, WindowedShard
from actors.moe.backend import ExpertBackend
from actors.offload.cache_factory import device_cache, expert_cache, predictor
from actors.offload.cached_backend import CachedBackend
from actors.offload.device_backend import DeviceBackend
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.ranks import Group, RankSpec, rank_name
from contracts.traces import Stage, TaskSpan
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore, split_layers
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import CheckpointParts, ExpertLayout
from models.experts.expert_store import ExpertSource, ExpertStore, ResidentStore
from models.experts.host_experts import HostSource, open_host_source
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import progress_line
from planner.placement.slots import check_fits

NewStore = Callable[[ExpertSource], ExpertStore]


class PeerSupply:
    """Gathered and hybrid."""

    unwritten_bytes = 0

    def __init__(
        self,
        spec: RankSpec,
        layout: ExpertLayout,
        timeline: Timeline,
        *,
        layers: Sequence[int],
        host: PartSource | None,
        new_store: NewStore,
    ) -> None:
        """layers: that are not resident. host: where the shard comes from, a window of layers at a
        time, and what lost peers do not give (None: all of it is read now, from the checkpoint)."""
        check_placement(spec)
        model = layout.spec
        check_fits(spec.placement, spec.prefill_ranks, model.num_experts, model.moe_layers)
        part = own_part(spec, layout)
        backup = host or CheckpointParts(Checkpoint(Path(spec.model_folder)), layout)
        shard: Shard
        if host is None:
            shard = ResidentShard(layers, part, backup)
        else:
            shard = WindowedShard(layers, part, host, spec.config.prefill.shard_prefetch_layers)
        self.source = PeerSource(spec, part, shard, backup)
        self.address = self.source.listen(spec.host)
        self._name, self._timeline = spec.name, timeline
        self._store = new_store(self.source)

    def backend(self, half: AttentionHalf) -> StoredBackend:
        return StoredBackend(self._name, half, self._store, self._timeline, monotonic_s)

    @property
    def degraded(self) -> str:
        """Why some experts come from the fallback; empty: they do not."""
        return "; ".join(self.source.lost.values())

    def bytes_moved(self) -> tuple[int, int]:
        return self.source.bytes_moved()

    def connect(self, addresses: dict[str, str]) -> None:
        self.source.connect(addresses)

    def close(self) -> None:
        self._store.close()


class LockstepSupply:
    """all_to_all: this worker has its share of the experts. A lost worker ends the group: it starts
    anew, with a new epoch, as a whole."""

    degraded = ""
    unwritten_bytes = 0

    def __init__(
        self,
        spec: RankSpec,
        model: ModelSpec,
        dtype: torch.dtype,
        timeline: Timeline,
        telemetry: Telemetry,
    ) -> None:
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
        )
        self._endpoint = rank_endpoint(spec, device, monotonic_s)
        self.address = self._endpoint.listen(spec.host)
        self._all_to_all = AllToAll(
            self._endpoint, workers, experts, spec.placement, timeline, monotonic_s
        )
        self._all_to_all.counts.show(telemetry, spec.name)

    def backend(self, half: AttentionHalf) -> LockstepBackend:
        return LockstepBackend(half, self._all_to_all)

    def bytes_moved(self) -> tuple[int, int]:
        return self._endpoint.bytes_moved()

    def connect(self, addresses: dict[str, str]) -> None:
        self._all_to_all.connect(addresses)

    def close(self) -> None:
        self._endpoint.close()


class ExpertSupply(Protocol):
    """A plane and what stands behind it. address: where peers join this worker, "" if nowhere.
    unwritten_bytes: of its memory, what it is going to fill and has not yet."""

    address: str
    unwritten_bytes: int

    def backend(self, half: AttentionHalf) -> ExpertBackend[Any]:
        """Where the experts of a worker with this half are computed."""

    @property
    def degraded(self) -> str:
        """What does not come from where it should, and why; empty: everything does."""

    def bytes_moved(self) -> tuple[int, int]:
        """Sent to and received from other workers, so far."""

    def connect(self, addresses: dict[str, str]) -> None:
        """The other workers: name -> address. Called again, with all, when one was replaced; from
        another thread than the store's. Raises ChannelError."""

    def close(self) -> None:
        """Ends the plane's store too. May be called twice."""


class LocalSupply:
    """Nothing comes from other workers."""

    address = ""
    degraded = ""

    def __init__(
        self,
        new_backend: Callable[[AttentionHalf], ExpertBackend[Any]],
        close: Callable[[], None],
        unwritten_bytes: int = 0,
    ) -> None:
        self._new_backend, self._close = new_backend, close
        self.unwritten_bytes = unwritten_bytes

    def backend(self, half: AttentionHalf) -> ExpertBackend[Any]:
        return self._new_backend(half)

    def bytes_moved(self) -> tuple[int, int]:
        return 0, 0

    def connect(self, addresses: dict[str, str]) -> None:
        """There is nobody to join."""

    def close(self) -> None:
        self._close()


def stored_supply(name: str, store: ExpertStore, timeline: Timeline) -> LocalSupply:
    """Experts of whole layers."""
    return LocalSupply(
        lambda half: StoredBackend(name, half, store, timeline, monotonic_s), store.close
    )


def cached_supply(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> LocalSupply:
    """Experts that come and go. Raises CheckpointError, ResourceError, ConfigError."""
    if layout.device.type == "cuda":
        return device_supply(spec, layout, timeline, telemetry)
    cache = expert_cache(spec, layout, telemetry)

    def new_backend(half: AttentionHalf) -> CachedBackend:
        ahead = predictor(spec, half)
        return CachedBackend(spec.name, half, cache, timeline, monotonic_s, ahead)

    return LocalSupply(new_backend, cache.close, cache.num_bytes)


def device_supply(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> LocalSupply:
    """The same in a GPU's memory."""
    held, deadline_s = device_cache(spec, layout, telemetry), spec.config.channel.connect_timeout_s

    def new_backend(half: AttentionHalf) -> DeviceBackend:
        ahead = predictor(spec, half)
        return DeviceBackend(
            spec.name, half, held, timeline, monotonic_s, ahead, deadline_s=deadline_s
        )

    return LocalSupply(new_backend, held.close)  # its memory is taken already


def expert_supply(
    spec: RankSpec,
    model: ModelSpec,
    dtype: torch.dtype,
    timeline: Timeline,
    telemetry: Telemetry,
) -> ExpertSupply:
    """As `spec.config.prefill.experts` says. timeline: hears of copies, on the store's thread.
    Raises CheckpointError, ResourceError."""
    kind = spec.config.prefill.experts
    if kind == "resident":
        store: ExpertStore = ResidentStore(_load(spec, model, dtype, model.moe_layers))
        return stored_supply(spec.name, store, timeline)
    if kind == "all_to_all":
        return LockstepSupply(spec, model, dtype, timeline, telemetry)
    layout = ExpertLayout(
        model, dtype, torch.device(spec.device), packed=spec.config.prefill.packed_experts
    )
    if kind == "cached":
        return cached_supply(spec, layout, timeline, telemetry)
    if kind == "streamed":
        source = host_source(spec, layout)
        store = copying_store(spec, layout, source, stage=Stage.HOST_COPY, observe=timeline.add)
        return stored_supply(spec.name, store, timeline)
    host = host_source(spec, layout) if kind == "hybrid" else None
    _, layers = split_layers(model, spec.config.prefill.resident_layers)
    new_store = partial(copying_store, spec, layout, stage=Stage.GATHER, observe=timeline.add)
    return PeerSupply(spec, layout, timeline, layers=layers, host=host, new_store=new_store)


def host_source(spec: RankSpec, layout: ExpertLayout) -> HostSource:
    """The complete expert set of the node. Raises CheckpointError, ResourceError."""
    where = spec.config.prefill.host_store
    return open_host_source(
        Path(spec.model_folder),
        layout,
        store=None if where is None else Path(where),
        deadline_s=spec.config.groups.ready_timeout_s,
    )


def copying_store(
    spec: RankSpec,
    layout: ExpertLayout,
    source: ExpertSource,
    *,
    stage: Stage,
    observe: Callable[[TaskSpan], None],
) -> CopyingStore:
    """The first `prefill.resident_layers` layers in memory, the others from `source`."""
    resident, _ = split_layers(layout.spec, spec.config.prefill.resident_layers)
    half = _load(spec, layout.spec, layout.dtype, resident)
    resource = f"experts>{spec.name}"
    return CopyingStore(
        source,
        {layer: half.held(layer) for layer in resident},
        layout,
        deadline_s=spec.config.channel.connect_timeout_s,
        observe=lambda layer, start_s, end_s: observe(
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
    )
