"""Where a prefill worker has its experts from: the store that its configuration names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from actors.experts.cached_plane import CachedPlane
from actors.experts.caching import expert_cache, foresight
from actors.experts.device_caching import device_cache
from actors.experts.device_plane import DevicePlane
from actors.experts.peer_supply import LockstepSupply, PeerSupply
from actors.experts.plane import ExpertPlane
from actors.experts.stored_plane import StoredPlane
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.events import Stage, TaskSpan
from contracts.worker import WorkerSpec
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore, split_layers
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertSource, ExpertStore, ResidentStore
from models.experts.host_experts import HostSource, open_host_source
from models.experts.moe import ExpertHalf
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import progress_line


class ExpertSupply(Protocol):
    """A plane and what stands behind it. address: where peers join this worker, "" if nowhere.
    unwritten_bytes: of its memory, what it is going to fill and has not yet."""

    address: str
    unwritten_bytes: int

    def plane(self, half: AttentionHalf) -> ExpertPlane[Any]:
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


class OwnSupply:
    """Nothing comes from other workers."""

    address = ""
    degraded = ""

    def __init__(
        self,
        new_plane: Callable[[AttentionHalf], ExpertPlane[Any]],
        close: Callable[[], None],
        unwritten_bytes: int = 0,
    ) -> None:
        self._new_plane, self._close = new_plane, close
        self.unwritten_bytes = unwritten_bytes

    def plane(self, half: AttentionHalf) -> ExpertPlane[Any]:
        return self._new_plane(half)

    def bytes_moved(self) -> tuple[int, int]:
        return 0, 0

    def connect(self, addresses: dict[str, str]) -> None:
        """There is nobody to join."""

    def close(self) -> None:
        self._close()


def stored_supply(name: str, store: ExpertStore, timeline: Timeline) -> OwnSupply:
    """Experts of whole layers."""
    return OwnSupply(
        lambda half: StoredPlane(name, half, store, timeline, monotonic_s), store.close
    )


def cached_supply(
    spec: WorkerSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> OwnSupply:
    """Experts that come and go. Raises CheckpointError, ResourceError, ConfigError."""
    if layout.device.type == "cuda":
        return device_supply(spec, layout, timeline, telemetry)
    cache = expert_cache(spec, layout, telemetry)

    def new_plane(half: AttentionHalf) -> CachedPlane:
        ahead = foresight(spec, half)
        return CachedPlane(spec.name, half, cache, timeline, monotonic_s, ahead)

    return OwnSupply(new_plane, cache.close, cache.num_bytes)


def device_supply(
    spec: WorkerSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> OwnSupply:
    """The same in a GPU's memory."""
    held, deadline_s = device_cache(spec, layout, telemetry), spec.config.channel.deadline_s

    def new_plane(half: AttentionHalf) -> DevicePlane:
        ahead = foresight(spec, half)
        return DevicePlane(
            spec.name, half, held, timeline, monotonic_s, ahead, deadline_s=deadline_s
        )

    return OwnSupply(new_plane, held.close)  # its memory is taken already


def expert_supply(
    spec: WorkerSpec,
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


def host_source(spec: WorkerSpec, layout: ExpertLayout) -> HostSource:
    """The complete expert set of the node. Raises CheckpointError, ResourceError."""
    where = spec.config.prefill.host_store
    return open_host_source(
        Path(spec.model_folder),
        layout,
        store=None if where is None else Path(where),
        deadline_s=spec.config.groups.ready_timeout_s,
    )


def copying_store(
    spec: WorkerSpec,
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
        deadline_s=spec.config.channel.deadline_s,
        observe=lambda layer, start_s, end_s: observe(
            TaskSpan(resource, stage, start_s, end_s, layer=layer)
        ),
    )


def _load(
    spec: WorkerSpec, model: ModelSpec, dtype: torch.dtype, layers: Sequence[int]
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
