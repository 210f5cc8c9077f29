"""What `doctor` says of experts that move while the group serves: whether the limits of a move fit
what this machine's memory has and gives."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import torch

from actors.offload.cache_factory import check_device
from cluster.tools.doctor.findings import Level
from contracts import machine
from contracts.clock import monotonic_s
from contracts.config import PlacementConfig, TandemConfig
from contracts.errors import ConfigError
from models.experts.slot_budget import slot_count
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import resolve_dtype

_COPIED_BYTES: Final = 64 << 20  # more than caches hold
_PIECE_BYTES: Final = 1 << 20  # as experts are brought in
_ROUNDS: Final = 3
_MOST_OF_A_CORE: Final = 0.5
_MIB, _GIB = 1 << 20, 1 << 30


class MoveDemand(NamedTuple):
    """ranks: that take experts in. expert_bytes, rank_bytes: of one expert, and of all that the
    fullest rank has slots for."""

    ranks: int
    expert_bytes: int
    rank_bytes: int


def copy_bytes_per_s() -> float:
    """At which one core copies what no cache has, the best of a few rounds; takes a tenth of a
    second."""
    source, target = (torch.ones(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    best_s = min(_copied_s(source, target) for _ in range(_ROUNDS))
    return _COPIED_BYTES / max(1e-9, best_s)


def _copied_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start_s = monotonic_s()
    for first in range(0, _COPIED_BYTES, _PIECE_BYTES):
        target[first : first + _PIECE_BYTES].copy_(source[first : first + _PIECE_BYTES])
    return monotonic_s() - start_s


def expert_moves(config: PlacementConfig, moving: MoveDemand) -> tuple[Level, str, str]:
    """(level, found, advice)."""
    if config.max_move_bytes < moving.expert_bytes:
        found = (
            f"placement.max_move_bytes={config.max_move_bytes}: an expert has "
            f"{moving.expert_bytes} bytes, none would ever move"
        )
        return "error", found, f"give {moving.expert_bytes} or more"
    most_bytes = min(config.max_move_bytes, moving.rank_bytes)
    seconds, copied = most_bytes / config.bytes_per_s, copy_bytes_per_s()
    share, free = config.bytes_per_s / copied, machine.available_bytes()
    found = (
        f"a move brings at most {most_bytes / _MIB:,.0f} MiB into a rank, at "
        f"{config.bytes_per_s / 1e6:,.0f} MB/s in {seconds:.2g} s; a core here copies "
        f"{copied / 1e9:.1f} GB/s, {share:.0%} of it goes there; "
        f"{moving.ranks * most_bytes / _GIB:.2f} of {free / _GIB:.1f} GiB free for "
        f"{moving.ranks} rank(s)"
    )
    advice = _advice(config, moving, most_bytes, copied, free)
    return ("warning" if advice else "ok"), found, advice


def _advice(
    config: PlacementConfig, moving: MoveDemand, most_bytes: int, copied: float, free: int
) -> str:
    """Empty where all is well."""
    in_time = int(config.bytes_per_s * config.move_timeout_s)
    if most_bytes > in_time:
        return (
            f"it is given up after placement.move_timeout_s={config.move_timeout_s:g}: "
            f"set max_move_bytes to {in_time} or less, or a longer move_timeout_s"
        )
    if moving.ranks * most_bytes > free:
        return (
            f"too much where all ranks are here: move_bytes at most {free // moving.ranks}, or "
            "expert ranks on other nodes"
        )
    if config.bytes_per_s > _MOST_OF_A_CORE * copied:
        return (
            "it slows down what the rank computes: placement.bytes_per_s at most "
            f"{_MOST_OF_A_CORE * copied:.2g}"
        )
    return ""


_MEBIBYTE = 1 << 20


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
    slots, whole = slot_count(config.experts, expert_bytes, spec), _all_experts(spec)
    pinned, free = whole * expert_bytes, machine.available_bytes()
    found = (
        f"a worker keeps {slots} of {whole} on its GPU, "
        f"{slots * expert_bytes / _MEBIBYTE:,.0f} MiB; "
        f"all are pinned in the host's memory, {pinned / _MEBIBYTE:,.0f} MiB, as a file in {folder}"
    )
    if pinned > free:
        advice = (
            f"{free / _MEBIBYTE:,.0f} MiB are free here: set groups.device=cpu, or use more memory"
        )
        return "warning", found, advice
    return "ok", found, ""


def _all_experts(spec: ModelSpec) -> int:
    return len(spec.moe_layers) * spec.num_experts
