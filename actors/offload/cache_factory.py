"""Expert caches and predictors of a worker, as configured by the section `experts`."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from actors.offload.file_tier import FileTier, open_expert_file
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.config import ExpertsConfig
from contracts.errors import ConfigError, ResourceError
from contracts.logs import event
from contracts.ranks import RankSpec
from models.decoder.decoder import AttentionHalf
from models.experts.device_lanes import device_lane
from models.experts.device_tier import DeviceCache, DeviceSlots, DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.expert_format import slot_format
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_expert_memory
from models.prediction.expert_predictor import ExpertPredictor, Speculation
from models.prediction.profile_file import has_predictor
from models.prediction.routing_profile import RoutingProfile
from models.spec.checkpoint_files import ROUTING, SafetensorsFile
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint


def slot_count(
    config: ExpertsConfig,
    expert_bytes: int,
    model: ModelSpec,
    own: Mapping[int, Sequence[int]] | None = None,
) -> int:
    """Return the number of slots, at most one for each expert of the worker.

    own: the worker's experts by layer; None: all. Raises ConfigError if the experts of a token do
    not fit.
    """
    layers = len(model.moe_layers)
    held = [model.num_experts] * layers if own is None else list(map(len, own.values()))
    given, name = config.slots, f"experts.slots={config.slots}"
    if config.bytes is not None:
        given, name = config.bytes // expert_bytes, f"experts.bytes={config.bytes}"
    assert given is not None
    needed = min(model.top_k, max(held))
    if given < needed:
        raise ConfigError(
            f"{name}: room for {given} experts, but a token is computed with {needed} of a "
            f"layer: give at least experts.slots={needed}, or experts.bytes={needed * expert_bytes}"
        )
    return min(given, sum(held))


_log = logging.getLogger("tandem.worker")


def expert_cache(
    spec: RankSpec,
    layout: ExpertLayout,
    telemetry: Telemetry,
    *,
    own: Mapping[int, Sequence[int]] | None = None,
) -> ExpertCache:
    """Return the cache of an expert rank or CPU worker. own: experts by layer; None: all.

    Raises CheckpointError, ResourceError, ConfigError.
    """
    config, model = spec.config, layout.spec
    folder = Path(spec.model_folder)
    form = slot_format(Checkpoint(folder), layout, config.experts.storage_format)
    slots = slot_count(config.experts, sum(form.sizes), model, own)
    where = config.prefill.host_store
    file = open_expert_file(
        folder,
        form,
        store=None if where is None else Path(where),
        deadline_s=config.groups.ready_timeout_s,
        direct_io=config.experts.direct_io,
    )
    order, deadline_s = config.experts.eviction_policy, config.channel.connect_timeout_s
    cache = ExpertCache(FileTier(file), form.slots(slots), order, deadline_s=deadline_s)
    show(cache, model.moe_layers, spec.name, telemetry)
    return cache


def show(cache: ExpertCache, layers: Sequence[int], name: str, telemetry: Telemetry) -> None:
    """Register the metrics of the cache."""
    traffic = cache.traffic
    telemetry.read(metrics.EXPERT_WAIT, name, of=lambda: traffic.waited_s)
    for cause in traffic.read_bytes:
        of = partial(traffic.read_bytes.__getitem__, cause)
        telemetry.read(metrics.EXPERT_READ, name, cause, of=of)
    for layer in layers:
        of_layer = partial(traffic.hit_fraction, layer)
        telemetry.read(metrics.PREFETCH_HIT, str(layer), name, of=of_layer)


def predictor(spec: RankSpec, half: AttentionHalf) -> ExpertPredictor | None:
    """Return the predictor, or None if disabled. Raises CheckpointError, ConfigError."""
    config = spec.config.experts
    if config.predictor == "none":
        return None
    needed = config.predictor in ("fitted", "quasi", "estimator")
    profile = _profile(spec, half.spec, f"experts.predictor={config.predictor}" if needed else None)
    if profile is not None:
        profile = profile.to(half.device)
    return ExpertPredictor(half, profile, config.predictor, speculation=_speculation(config, half))


def _profile(spec: RankSpec, model: ModelSpec, needed_by: str | None) -> RoutingProfile | None:
    """Return the configured profile, or the checkpoint's own if it has predictors.

    needed_by: the setting that requires one. Raises CheckpointError, ConfigError.
    """
    config, folder = spec.config.experts, Path(spec.model_folder)
    own = folder / ROUTING
    path = Path(config.profile) if config.profile else own if own.is_file() else None
    if path is None and needed_by is not None:
        raise ConfigError(
            f"{needed_by}: needs a profile, and {folder} has none: set experts.profile to a file "
            "of `tandem profile --routing`"
        )
    if path is None:
        return None
    is_found = not config.profile and needed_by is None
    if is_found and not has_predictor(SafetensorsFile(path)):
        event(_log, "routing_profile_without_predictors", path=path)
        return None
    return RoutingProfile.read(path, folder, model)


def _speculation(config: ExpertsConfig, half: AttentionHalf) -> Speculation | None:
    if config.speculative == "exact":
        return None
    known, layers = half.spec.moe_layers[1:], config.speculative_layers
    unknown = sorted(set(layers or ()) - set(known))
    if unknown:
        raise ConfigError(
            f"experts.speculative_layers: {unknown} cannot be predicted: give some of {list(known)}"
        )
    return Speculation(None if layers is None else frozenset(layers), config.speculative_weights)


def device_cache(
    spec: RankSpec,
    layout: ExpertLayout,
    telemetry: Telemetry,
    *,
    own: Mapping[int, Sequence[int]] | None = None,
) -> DeviceCache:
    """Return a GPU's cache. own: as of `expert_cache`.

    Raises CheckpointError, ResourceError, ConfigError.
    """
    config, expert_bytes = spec.config, layout.num_bytes(1)
    slots = slot_count(config.experts, expert_bytes, layout.spec, own)
    check_memory(config.experts, slots, expert_bytes, free_bytes(layout.device), spec.device)
    where = config.prefill.host_store
    host = open_expert_memory(
        Path(spec.model_folder),
        layout,
        store=None if where is None else Path(where),
        deadline_s=config.groups.ready_timeout_s,
    )
    try:
        memory = DeviceSlots(layout, slots)
    except (ResourceError, torch.OutOfMemoryError):
        host.close()
        raise
    lane = device_lane(layout.device)
    tier = DeviceTier(host, layout, lane)
    order, deadline_s = config.experts.eviction_policy, config.channel.connect_timeout_s
    cache = ExpertCache(tier, memory, order, deadline_s=deadline_s)
    show(cache, layout.spec.moe_layers, spec.name, telemetry)
    return DeviceCache(cache, memory, tier, lane, host.close)


def check_memory(
    config: ExpertsConfig, slots: int, expert_bytes: int, free: int, device: str
) -> None:
    """Raise ResourceError if the slots exceed the free device memory."""
    if slots * expert_bytes <= free:
        return
    name = "slots" if config.slots is not None else "bytes"
    given = config.slots if config.slots is not None else config.bytes
    most = free // expert_bytes
    allowed = most if name == "slots" else most * expert_bytes
    raise ResourceError(
        f"experts.{name}={given}: {slots} experts of {expert_bytes} bytes are "
        f"{slots * expert_bytes}, and {free} bytes are free on {device}: give less than "
        f"experts.{name}={allowed}, for attention and the KV pool need memory too"
    )


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU; unlimited for a CPU."""
    if device.type != "cuda":
        return 1 << 62
    return int(torch.cuda.mem_get_info(device)[0])
