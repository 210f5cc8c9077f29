"""What `doctor` says of experts that are kept on a GPU, the others in the host's memory."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.experts.device_caching import check_device
from cluster.files.findings import Level
from contracts import machine
from contracts.config import TandemConfig
from contracts.errors import ConfigError
from models.experts.slot_budget import slots_for
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import resolve_dtype

_MIB = 1 << 20


def runs_on_gpu(config: TandemConfig) -> bool:
    """As far as can be told without a cluster."""
    device = config.groups.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def gpu_experts(config: TandemConfig, spec: ModelSpec, folder: Path) -> tuple[Level, str, str]:
    """(level, found, advice). folder: of the file of all experts. Raises ConfigError."""
    check_device(config.experts, "a GPU")
    if config.groups.expert_ranks:
        raise ConfigError(
            f"groups.expert_ranks={config.groups.expert_ranks}: expert ranks keep all of their "
            "experts on a GPU: leave experts.slots and experts.bytes out, or set groups.device=cpu"
        )
    expert_bytes = layout.expert_elements(spec) * resolve_dtype(spec, config.model.dtype).itemsize
    slots, whole = slots_for(config.experts, expert_bytes, spec), _all_experts(spec)
    pinned, free = whole * expert_bytes, machine.available_bytes()
    found = (
        f"a worker keeps {slots} of {whole} on its GPU, {slots * expert_bytes / _MIB:,.0f} MiB; "
        f"all are pinned in the host's memory, {pinned / _MIB:,.0f} MiB, as a file in {folder}"
    )
    if pinned > free:
        advice = f"{free / _MIB:,.0f} MiB are free here: set groups.device=cpu, or use more memory"
        return "warning", found, advice
    return "ok", found, ""


def _all_experts(spec: ModelSpec) -> int:
    return len(spec.moe_layers) * spec.num_experts
