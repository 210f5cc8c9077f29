"""Bytes of weights in the ranks of a configuration."""

from __future__ import annotations

from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_placement_file
from contracts.config import TandemConfig
from models.experts.expert_format import CheckpointFormat
from models.experts.slot_budget import slot_count
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, resolve_dtype
from models.weights.loading import total_bytes


def group_weight_bytes(config: TandemConfig, spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes in each attention rank, and in all expert ranks. Raises ConfigError."""
    dtype, expert_bytes = resolve_dtype(spec, config.model.dtype), bytes_per_expert(config, spec)
    ranks = config.groups.expert_ranks
    experts = placed_experts(config, spec) if ranks else len(spec.moe_layers) * spec.num_experts
    if config.experts.is_bounded and ranks:
        experts = min(experts, ranks * slot_count(config.experts, expert_bytes, spec))
    attention = total_bytes(layout.attention_half_tensors(spec), dtype)
    return attention, experts * expert_bytes


def prefill_weight_bytes(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the bytes in a prefill worker's own memory: copies use two layers' buffers."""
    prefill, workers = config.prefill, config.groups.prefill_ranks
    dtype = resolve_dtype(spec, config.model.dtype)
    expert_bytes = layout.expert_elements(spec) * dtype.itemsize
    if prefill.experts == "cached":
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
        "cached": 0,
    }[prefill.experts]
    if prefill.experts == "cached":
        held = slot_count(config.experts, expert_bytes, spec) / spec.num_experts
    return total_bytes(layout.attention_half_tensors(spec), dtype) + round(held * layer_bytes)


def placed_experts(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the number of slots of the placed group over all layers. Raises ConfigError."""
    folder, placing = resolve_model_folder(config.model.path), config.placement
    placement = check_placement_file(config, folder, spec)
    if placement is not None:
        return sum(map(len, placement.expert_of_slot))
    spare = placing.spare_slots * config.groups.expert_ranks if placing.rebalance != "off" else 0
    return len(spec.moe_layers) * (spec.num_experts + spare)


def bytes_per_expert(config: TandemConfig, spec: ModelSpec) -> int:
    """Return the bytes of one expert as a cache stores it. Raises CheckpointError."""
    dtype = resolve_dtype(spec, config.model.dtype)
    if config.experts.is_bounded and config.experts.storage_format:
        checkpoint = Checkpoint(resolve_model_folder(config.model.path))
        return sum(CheckpointFormat(checkpoint, spec, dtype).sizes)
    return layout.expert_elements(spec) * dtype.itemsize


def _lockstep_share(config: TandemConfig, spec: ModelSpec) -> float:
    """Return the experts of an all_to_all worker, in layers."""
    slots = len(spec.moe_layers) * spec.num_experts
    if config.placement.file is not None and config.groups.expert_ranks == 0:
        slots = placed_experts(config, spec)
    return slots / spec.num_experts / config.groups.prefill_ranks
