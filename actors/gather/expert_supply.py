"""Expert backends of a prefill worker, selected by `prefill.experts`."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actors.channels.factory import rank_endpoint
from actors.gather.all_to_all import AllToAll, LockstepBackend
from actors.gather.group_exchange import GroupExchange
from actors.gather.peer_source import PeerSource, own_part
from actors.gather.shared_cache import GroupHalf
from actors.gather.shuffled import BatchFacts, GroupParts, ShuffledBackend
from actors.gather.stored_backend import StoredBackend
from actors.gather.weight_shard import Shard
from actors.moe.backend import ExpertBackend
from actors.offload.cache_factory import device_cache, expert_cache, predictor
from actors.offload.device_backend import CachedBackend, DeviceBackend
from actors.telemetry.telemetry import Telemetry, Timeline
from contracts.clock import monotonic_s
from contracts.ranks import Group, RankSpec, rank_name
from contracts.traces import Stage, TaskSpan
from models.decoder.decoder import AttentionHalf
from models.decoder.divided_heads import check_divisible, divided_half, head_share
from models.experts.copying_store import CopyingStore, ExpertSource
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import CheckpointParts, HostSource, open_host_source
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.loading import progress_line
from planner.placement.nodes import levels_of_hosts
from planner.placement.slots import check_fits


class ExpertSupply(NamedTuple):
    """The expert backend of a prefill worker and what it owns.

    address: where peers reach this worker, "" if nowhere. unwritten_bytes: memory that is reserved
    and not filled yet. degraded: why experts do not come from their usual place, "" if they do.
    bytes_moved: sent to and received from other workers so far. connect: joins other workers (name
    -> address), called again with all of them after a replacement; raises ChannelError. close: may
    be called twice. shared_batches: that this worker led to their end, or that lost a worker.
    """

    backend: Callable[[AttentionHalf], ExpertBackend[Any]]
    close: Callable[[], None]
    unwritten_bytes: int = 0
    address: str = ""
    degraded: Callable[[], str] = str
    bytes_moved: Callable[[], tuple[int, int]] = lambda: (0, 0)
    connect: Callable[[dict[str, str]], None] = lambda addresses: None
    shared_batches: dict[str, float] | None = None


def expert_supply(
    spec: RankSpec,
    model: ModelSpec,
    dtype: torch.dtype,
    timeline: Timeline,
    telemetry: Telemetry,
    facts: BatchFacts,
) -> ExpertSupply:
    """Build what `prefill.experts` selects. Raises CheckpointError, ResourceError, ConfigError."""
    kind = spec.config.prefill.experts
    layout = ExpertLayout(
        model, dtype, torch.device(spec.device), packed=spec.config.prefill.packed_experts
    )
    if kind == "resident":
        experts = _load(spec, layout, range(model.num_experts)).layers()
        store = CopyingStore(
            None, experts, layout, deadline_s=spec.config.channel.connect_timeout_s
        )
        return _stored(spec, store, timeline)
    if kind == "all_to_all":
        return _lockstep(spec, layout, timeline, telemetry)
    if kind == "cached":
        return cached_supply(spec, layout, timeline, telemetry)
    if kind == "streamed":
        store = copying_store(spec, layout, host_source(spec, layout), Stage.HOST_COPY, timeline)
        return _stored(spec, store, timeline)
    if kind == "shuffled":
        return _shuffled(spec, layout, timeline, facts)
    host = host_source(spec, layout) if kind == "hybrid" else None
    return _gathered(spec, layout, timeline, host)[1]


def cached_supply(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """Experts that are loaded on demand. Raises CheckpointError, ResourceError, ConfigError."""
    if layout.device.type == "cuda":
        return device_supply(spec, layout, timeline, telemetry)
    cache = expert_cache(spec, layout, telemetry)
    return ExpertSupply(
        lambda half: CachedBackend(spec.name, half, cache, timeline, predictor(spec, half)),
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
            spec.name, half, held, timeline, predictor(spec, half), deadline_s=deadline_s
        ),
        held.close,
    )


def _stored(spec: RankSpec, store: CopyingStore, timeline: Timeline) -> ExpertSupply:
    return ExpertSupply(lambda half: StoredBackend(spec.name, half, store, timeline), store.close)


def _gathered(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, host: HostSource | None
) -> tuple[CopyingStore, ExpertSupply]:
    """Gathered and hybrid mode.

    host: fills a window of the shard, and replaces lost peers. None: the whole shard is read now,
    from the checkpoint.
    """
    model = layout.spec
    check_fits(spec.placement, spec.prefill_ranks, model.num_experts, model.moe_layers)
    layers = model.moe_layers[spec.config.prefill.resident_layers :]
    window = None if host is None else spec.config.prefill.shard_prefetch_layers
    host = host or CheckpointParts(Checkpoint(Path(spec.model_folder)), layout)
    shard = Shard(layers, own_part(spec, layout), host, window)
    source = PeerSource(spec, shard, host)
    address = source.listen(spec.host)
    store = copying_store(spec, layout, source, Stage.GATHER, timeline)

    def close() -> None:
        source.abort()  # a copy that waits for a peer
        store.close()

    return store, _stored(spec, store, timeline)._replace(
        close=close,
        address=address,
        degraded=lambda: "; ".join(source.lost.values()),
        bytes_moved=source.bytes_moved,
        connect=source.connect,
    )


def _shuffled(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, facts: BatchFacts
) -> ExpertSupply:
    """Shuffled mode: as gathered, with a second copy of this worker's experts to compute with.

    An address has that of the weights and that of the channel.
    """
    model, config = layout.spec, spec.config
    workers = spec.prefill_ranks
    check_divisible(model, workers)
    store, gathered = _gathered(spec, layout, timeline, None)
    endpoint = rank_endpoint(spec, layout.device, monotonic_s)
    checkpoint = Checkpoint(Path(spec.model_folder))
    own = ExpertHalf.load(
        checkpoint, model, spec.own_experts, dtype=layout.dtype, device=layout.device
    )
    names = [rank_name(Group.PREFILL, rank) for rank in range(workers)]
    exchange = GroupExchange(endpoint, names, own, spec.placement, timeline)
    shares = tuple(head_share(model, rank, workers) for rank in range(workers))

    shared_batches = {"led": 0.0, "lost": 0.0, "left": 0.0}

    @functools.cache
    def slices() -> ExpertHalf:
        return ExpertHalf.load_slices(checkpoint, model, spec.rank, workers, layout.dtype)

    def backend(half: AttentionHalf) -> ShuffledBackend:
        divided = divided_half(half, checkpoint, shares[spec.rank], exchange.total)
        group = GroupHalf(divided, shares, config.kv.block_tokens, slices)
        keeps_kv = not config.prefill.disable_kv_cache
        parts = GroupParts(exchange, group, facts, shared_batches, keeps_kv=keeps_kv)
        return ShuffledBackend(spec.name, half, store, timeline, parts)

    def connect(addresses: dict[str, str]) -> None:
        split = {peer: address.split(" ") for peer, address in addresses.items()}
        gathered.connect({peer: both[0] for peer, both in split.items()})
        exchange.join({peer: both[-1] for peer, both in split.items()})
        hosts = {peer: _host(both[0], spec.host) for peer, both in split.items()}
        exchange.levels = levels_of_hosts([hosts.get(name, spec.host) for name in names])

    def close() -> None:
        gathered.close()
        endpoint.close()

    def bytes_moved() -> tuple[int, int]:
        (sent, received), (other, more) = gathered.bytes_moved(), endpoint.bytes_moved()
        return sent + other, received + more

    address = f"{gathered.address} {endpoint.listen(spec.host)}"
    return gathered._replace(
        backend=backend,
        close=close,
        address=address,
        bytes_moved=bytes_moved,
        connect=connect,
        shared_batches=shared_batches,
    )


def _host(address: str, own: str) -> str:
    """Return the host of an address; one without a host is on this node."""
    _, tcp, place = address.rpartition("tcp:")
    return place.rpartition(":")[0] if tcp else own


def _lockstep(
    spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
) -> ExpertSupply:
    """All-to-all mode: each worker has a share of the experts. A lost worker restarts the group."""
    workers = [rank_name(Group.PREFILL, rank) for rank in range(spec.prefill_ranks)]
    check_fits(spec.placement, len(workers), layout.spec.num_experts, layout.spec.moe_layers)
    experts = _load(spec, layout, spec.own_experts)
    endpoint = rank_endpoint(spec, layout.device, monotonic_s)
    address = endpoint.listen(spec.host)
    all_to_all = AllToAll(endpoint, workers, experts, spec.placement, timeline)
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
    resident = layout.spec.moe_layers[: spec.config.prefill.resident_layers]
    half = _load(spec, layout, range(layout.spec.num_experts), resident)
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
    spec: RankSpec,
    layout: ExpertLayout,
    experts: Sequence[int] | Mapping[int, Sequence[int]],
    layers: Sequence[int] | None = None,
) -> ExpertHalf:
    return ExpertHalf.load(
        Checkpoint(Path(spec.model_folder)),
        layout.spec,
        experts,
        dtype=layout.dtype,
        device=layout.device,
        progress=progress_line(spec.name, sys.stderr),
        layers=layers,
        storage_format=spec.config.experts.storage_format,
    )
