"""A worker's cache of experts, and what foretells their use: as the section `experts` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from actors.experts.file_tier import FileTier
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from contracts.config import ExpertsConfig
from contracts.errors import ConfigError
from contracts.expert_slots import ExpertKey
from contracts.logs import event
from contracts.worker import WorkerSpec
from models.decoder.decoder import AttentionHalf
from models.experts.expert_cache import ExpertCache
from models.experts.expert_file import open_expert_file
from models.experts.expert_form import AsComputed, AsStored, ExpertForm
from models.experts.expert_layout import ExpertLayout
from models.experts.slot_budget import slots_for
from models.foresight.foresight import Foresight, Speculation
from models.foresight.profile_file import holds_foresight
from models.foresight.routing_profile import RoutingProfile
from models.spec.model import ModelSpec
from models.spec.safetensors_file import SafetensorsFile
from models.spec.stored_names import ROUTING
from models.weights.checkpoint import Checkpoint
from planner.policies.eviction import eviction
from planner.policies.read_ahead import pays

_log = logging.getLogger("tandem.worker")


def expert_cache(
    spec: WorkerSpec,
    layout: ExpertLayout,
    telemetry: Telemetry,
    *,
    own: Mapping[int, Sequence[int]] | None = None,
) -> ExpertCache:
    """own: by layer, the worker's experts; None: all. Raises CheckpointError, ResourceError,
    ConfigError."""
    config, model = spec.config, layout.spec
    if layout.device.type != "cpu":
        raise ConfigError(
            f"{spec.name}: expert ranks keep all of their experts on {spec.device}: leave "
            "experts.slots and experts.bytes out, or set groups.device=cpu"
        )
    form = _form(spec, layout)
    slots = slots_for(config.experts, sum(form.sizes), model, own)
    where = config.prefill.host_store
    file = open_expert_file(
        Path(spec.model_folder),
        form,
        store=None if where is None else Path(where),
        deadline_s=config.groups.ready_timeout_s,
        direct=config.experts.direct,
    )
    order = eviction(config.experts.evict, slots, frequencies(spec, model, own))
    deadline_s = config.channel.deadline_s
    cache = ExpertCache(FileTier(file), form, slots, order, pays, deadline_s=deadline_s)
    show(cache, spec.name, telemetry)
    return cache


def _form(spec: WorkerSpec, layout: ExpertLayout) -> ExpertForm:
    if not spec.config.experts.stored:
        return AsComputed(layout)
    return AsStored(Checkpoint(Path(spec.model_folder)), layout.spec, layout.dtype)


def show(cache: ExpertCache, name: str, telemetry: Telemetry) -> None:
    """How often experts were there, and what it cost to bring the others."""
    traffic = cache.traffic
    telemetry.read(metrics.EXPERT_WAIT, name, of=lambda: traffic.waited_s)
    for cause in traffic.read_bytes:
        of = partial(traffic.read_bytes.__getitem__, cause)
        telemetry.read(metrics.EXPERT_READ, name, cause, of=of)
    for layer in cache.layers:
        telemetry.read(metrics.PREFETCH_HIT, str(layer), of=partial(traffic.hit_fraction, layer))


def foresight(spec: WorkerSpec, half: AttentionHalf) -> Foresight | None:
    """None: nothing is to be read ahead. Raises CheckpointError, ConfigError."""
    config = spec.config.experts
    if config.hints == "none":
        return None
    needed = config.hints in ("fitted", "quasi", "estimator")
    profile = _profile(spec, half.spec, f"experts.hints={config.hints}" if needed else None)
    if profile is not None:
        profile = profile.on(half.device)
    return Foresight(
        half, profile, config.hints, again=config.hint_again, speculation=_speculation(config, half)
    )


def frequencies(
    spec: WorkerSpec, model: ModelSpec, own: Mapping[int, Sequence[int]] | None = None
) -> dict[ExpertKey, float]:
    """Of use, of those that the worker may keep; empty where nobody asks for them."""
    if spec.config.experts.evict != "pinned":
        return {}
    profile = _profile(spec, model, "experts.evict=pinned")
    assert profile is not None
    every = range(model.num_experts)
    return {
        ExpertKey(layer, expert): float(frequency_E[expert])
        for layer, frequency_E in profile.frequencies.items()
        for expert in (every if own is None else own[layer])
    }


def _profile(spec: WorkerSpec, model: ModelSpec, needed_by: str | None) -> RoutingProfile | None:
    """The one that is configured, or beside the checkpoint, if it foretells anything. needed_by:
    what cannot do without one; None: nothing. Raises CheckpointError, ConfigError."""
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
    if is_found and not holds_foresight(SafetensorsFile(path)):
        event(_log, "routing_profile_of_counts_alone", path=path)
        return None
    return RoutingProfile.read(path, folder, model)


def _speculation(config: ExpertsConfig, half: AttentionHalf) -> Speculation | None:
    if config.execute == "exact":
        return None
    known, layers = half.spec.moe_layers[1:], config.speculated_layers
    unknown = sorted(set(layers or ()) - set(known))
    if unknown:
        raise ConfigError(
            f"experts.speculated_layers: nothing is foretold of {unknown}: give some of "
            f"{list(known)}"
        )
    return Speculation(None if layers is None else frozenset(layers), config.speculated_weights)
