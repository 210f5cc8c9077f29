"""Checks of the ranks' weights and experts against this machine, for `tandem doctor`.

A check returns (level, found) or (level, found, advice), and raises TandemError for settings that
no server starts with.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from actors.offload.cache_factory import slot_count
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_placement_file
from cluster.tools.doctor.findings import Level
from contracts import machine
from contracts.config import TandemConfig
from contracts.device_modes import check_device
from models.experts.expert_format import slot_format
from models.experts.expert_layout import ExpertLayout
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, element_bytes, resolve_dtype


def group_weight_bytes(config: TandemConfig, spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes in each attention rank, and in all expert ranks. Raises ConfigError."""
    element, expert_bytes = element_bytes(spec, config.model.dtype), bytes_per_expert(config, spec)
    ranks = config.groups.expert_ranks
    experts = placed_experts(config, spec) if ranks else len(spec.moe_layers) * spec.num_experts
    if config.experts.is_bounded and ranks:
        experts = min(experts, ranks * slot_count(config.experts, expert_bytes, spec))
    attention = layout.total_bytes(layout.attention_half_tensors(spec), element)
    return attention, experts * expert_bytes


def prefill_weight_bytes(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the bytes in a prefill worker's own memory: copies use two layers' buffers."""
    prefill, workers = config.prefill, config.groups.prefill_ranks
    element = element_bytes(spec, config.model.dtype)
    expert_bytes = layout.expert_elements(spec) * element
    if prefill.experts in ("resident", "all_to_all", "cached"):
        expert_bytes = bytes_per_expert(config, spec)
    layer_bytes = spec.num_experts * expert_bytes
    layers = len(spec.moe_layers)
    resident = min(prefill.resident_layers, layers)
    copied = layers - resident
    held = {
        "resident": layers,
        "gathered": resident + min(copied, 2) + copied / workers,
        "streamed": resident + min(copied, 2),
        "hybrid": resident + min(copied, 2) + min(copied, prefill.shard_prefetch_layers) / workers,
        "all_to_all": _lockstep_share(config, spec),
        "shuffled": resident + min(copied, 2) + (copied + layers) / workers,
        "cached": 0,
    }[prefill.experts]
    if prefill.experts == "cached":
        held = slot_count(config.experts, expert_bytes, spec) / spec.num_experts
    attention = layout.total_bytes(layout.attention_half_tensors(spec), element)
    return attention + round(held * layer_bytes)


def placed_experts(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the number of slots of the placed group over all layers. Raises ConfigError."""
    folder, placing = resolve_model_folder(config.model.path), config.placement
    placement = check_placement_file(config, folder, spec)
    if placement is not None:
        return sum(map(len, placement.expert_of_slot))
    spare = placing.spare_slots * config.groups.expert_ranks if placing.rebalance != "off" else 0
    return len(spec.moe_layers) * (spec.num_experts + spare)


def bytes_per_expert(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the bytes of one expert as a rank keeps it. Raises CheckpointError."""
    dtype = resolve_dtype(spec, config.model.dtype)
    stored = config.experts.storage_format
    if config.groups.device == "cuda" and stored is not True:
        return layout.expert_elements(spec) * dtype.itemsize
    checkpoint, device = Checkpoint(resolve_model_folder(config.model.path)), torch.device("cpu")
    expert_layout = ExpertLayout(spec, dtype, device)
    return sum(slot_format(checkpoint, expert_layout, stored).sizes)


def _lockstep_share(config: TandemConfig, spec: ModelSpec) -> float:
    """Return the experts of an all_to_all worker, in layers."""
    slots = len(spec.moe_layers) * spec.num_experts
    if config.placement.file is not None and config.groups.expert_ranks == 0:
        slots = placed_experts(config, spec)
    return slots / spec.num_experts / config.groups.prefill_ranks


MIB: Final = 1 << 20

Result = tuple[Level, str] | tuple[Level, str, str]


def _groups(config: TandemConfig, spec: ModelSpec) -> Result:
    attention, experts = config.groups.attention_ranks, config.groups.expert_ranks
    if attention == 0:
        return "ok", "no attention and expert ranks: prefill workers generate"
    each, all_experts = group_weight_bytes(config, spec)
    found = (
        f"{attention} attention rank(s), {each / MIB:,.0f} MiB of weights each; "
        f"{experts} expert rank(s), {all_experts / MIB:,.0f} MiB together"
    )
    if _exceeds_memory(config, attention * each + all_experts):
        advice = "more than is free here: more nodes, fewer attention ranks, or a smaller model"
        return "warning", found, advice
    return "ok", found


def _prefill(config: TandemConfig, spec: ModelSpec) -> Result:
    workers, kind = config.groups.prefill_ranks, config.prefill.experts
    if workers == 0:
        return "ok", "no prefill workers: attention and expert ranks classify"
    each = prefill_weight_bytes(config, spec)
    found = f"{workers} worker(s), experts {kind}: {each / MIB:,.0f} MiB of weights each"
    if workers == 1 and kind in ("gathered", "hybrid", "all_to_all", "shuffled"):
        advice = "one worker has no others to fetch from: prefill.experts=resident or streamed"
        return "warning", found, advice
    if _exceeds_memory(config, workers * each):
        advice = "more than is free here: prefill.experts=gathered or streamed, or fewer workers"
        return "warning", found, advice
    return "ok", found


def _exceeds_memory(config: TandemConfig, num_bytes: int) -> bool:
    return config.groups.device != "cuda" and num_bytes > machine.available_bytes()


def _experts(config: TandemConfig, spec: ModelSpec) -> Result:
    """Check the cache of experts, if workers do not hold all of theirs."""
    is_cached = config.prefill.experts == "cached" and config.groups.prefill_ranks
    if not config.experts.is_bounded or not (is_cached or config.groups.expert_ranks):
        return "ok", "each worker holds all of its experts"
    folder = Path(config.prefill.host_store or tempfile.gettempdir())
    device = config.groups.device
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return _gpu_experts(config, spec, folder)
    slots = slot_count(config.experts, bytes_per_expert(config, spec), spec)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = "set prefill.host_store to a folder that can be written"
        return "error", f"{folder}: {error.strerror}", advice
    return "ok", f"a worker holds {slots} of {_all_experts(spec)}; it reads others from {folder}"


def _gpu_experts(config: TandemConfig, spec: ModelSpec, folder: Path) -> Result:
    check_device(config, "cuda")
    expert_bytes = layout.expert_elements(spec) * element_bytes(spec, config.model.dtype)
    slots, whole = slot_count(config.experts, expert_bytes, spec), _all_experts(spec)
    pinned, free = whole * expert_bytes, machine.available_bytes()
    found = (
        f"a worker holds {slots} of {whole} on its GPU, {slots * expert_bytes / MIB:,.0f} MiB; "
        f"all are pinned in the host's memory, {pinned / MIB:,.0f} MiB, as a file in {folder}"
    )
    if pinned > free:
        advice = f"{free / MIB:,.0f} MiB are free here: set groups.device=cpu, or use more memory"
        return "warning", found, advice
    return "ok", found


def _placement(config: TandemConfig, spec: ModelSpec) -> Result:
    placing = config.placement
    if placing.file is None:
        found = "experts in order, each once"
        if placing.rebalance != "off" and config.groups.expert_ranks:
            found += f"; rebalanced by traffic, with {placing.spare_slots} spare slots a rank"
        return "ok", found
    replicas = placed_experts(config, spec) - _all_experts(spec)
    size = replicas * bytes_per_expert(config, spec) / MIB
    return "ok", f"{placing.file}: {replicas} replicas, {size:,.0f} MiB"


def _moves(config: TandemConfig, spec: ModelSpec) -> Result:
    """Check the limits of a rebalance against the size of an expert and the free memory."""
    ranks, placing = config.groups.expert_ranks, config.placement
    if placing.rebalance == "off" or not ranks:
        return "ok", "none: experts stay where they are"
    if config.experts.is_bounded:
        return "ok", "copy nothing: ranks read experts on demand"
    expert_bytes, free = bytes_per_expert(config, spec), machine.available_bytes()
    if placing.max_move_bytes < expert_bytes:
        found = (
            f"placement.max_move_bytes={placing.max_move_bytes}: an expert has {expert_bytes} "
            "bytes, none would ever move"
        )
        return "error", found, f"give {expert_bytes} or more"
    rank_bytes = -(-placed_experts(config, spec) // ranks) * expert_bytes
    most = min(placing.max_move_bytes, rank_bytes)
    found = (
        f"a move copies at most {most / MIB:,.0f} MiB into a rank, in "
        f"{most / placing.bytes_per_s:.2g} s"
    )
    in_time = int(placing.bytes_per_s * placing.move_timeout_s)
    if most > in_time:
        advice = (
            f"it is aborted after placement.move_timeout_s={placing.move_timeout_s:g}: "
            f"set max_move_bytes to {in_time} or less, or a longer move_timeout_s"
        )
        return "warning", found, advice
    if ranks * most > free:
        advice = (
            "too much if all ranks are on this machine: set max_move_bytes to "
            f"{free // ranks} or less, or start expert ranks on other nodes"
        )
        return "warning", found, advice
    return "ok", found


def _all_experts(spec: ModelSpec) -> int:
    return len(spec.moe_layers) * spec.num_experts


CHECKS: Final[dict[str, Callable[[TandemConfig, ModelSpec], Result]]] = {
    "groups": _groups,
    "prefill": _prefill,
    "experts": _experts,
    "placement": _placement,
    "moves": _moves,
}
