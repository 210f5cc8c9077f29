"""Experts that are divided among the prefill workers: their weights travel, or activations do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from actors.channels.factory import rank_endpoint
from actors.experts.all_to_all import AllToAll
from actors.experts.lockstep_plane import LockstepPlane
from actors.experts.stored_plane import StoredPlane
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from actors.weights.weight_shard import HeldShard, PartSource, Shard, ShardWindow
from actors.weights.weight_source import PeerSource, check_placement, own_part
from contracts.clock import monotonic_s
from contracts.worker import Group, WorkerSpec, rank_name
from models.decoder.decoder import AttentionHalf
from models.experts.checkpoint_part import CheckpointParts
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertSource, ExpertStore
from models.experts.moe import ExpertHalf
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
        spec: WorkerSpec,
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
            shard = HeldShard(layers, part, backup)
        else:
            shard = ShardWindow(layers, part, host, spec.config.prefill.shard_window)
        self.source = PeerSource(spec, part, shard, backup)
        self.address = self.source.listen(spec.host)
        self._name, self._timeline = spec.name, timeline
        self._store = new_store(self.source)

    def plane(self, half: AttentionHalf) -> StoredPlane:
        return StoredPlane(self._name, half, self._store, self._timeline, monotonic_s)

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
        spec: WorkerSpec,
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

    def plane(self, half: AttentionHalf) -> LockstepPlane:
        return LockstepPlane(half, self._all_to_all)

    def bytes_moved(self) -> tuple[int, int]:
        return self._endpoint.bytes_moved()

    def connect(self, addresses: dict[str, str]) -> None:
        self._all_to_all.connect(addresses)

    def close(self) -> None:
        self._endpoint.close()
