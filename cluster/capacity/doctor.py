"""`tandem doctor`: what in this machine or configuration keeps Tandem from running well."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cluster.capacity.disk_rate import disk_rate
from cluster.capacity.expert_moves import Moving, expert_moves
from cluster.capacity.gpu_experts import gpu_experts, runs_on_gpu
from cluster.files.findings import Finding
from cluster.files.hardware import load_hardware
from cluster.files.keys_checked import keys_finding
from cluster.files.model_folder import check_tokenizer, resolve_model_folder
from cluster.fleet.placements import check_placement_file
from cluster.serving.front import bind
from contracts import machine
from contracts.config import TandemConfig
from contracts.errors import TandemError
from contracts.import_path import shadowing
from models.decoder.kv_pool import kv_bytes_per_token
from models.experts.expert_form import AsStored
from models.experts.slot_budget import slots_for
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import total_bytes
from planner.user.policy import UserPolicy, load_policy

PACKAGES = ("ray", "torch", "msgspec", "starlette", "uvicorn", "tokenizers")
MIN_DESCRIPTORS = 4096
NO_TOKENS = (
    "Ray listens on all interfaces and runs code for whoever may connect: RAY_AUTH_MODE=token "
    "where the cluster is started and here"
)
GIB, MIB = 1 << 30, 1 << 20


def examine(config: TandemConfig, environment: Mapping[str, str]) -> list[Finding]:
    """All checks, in order. None of them starts anything or waits for the network."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        lambda: _cores(config),
        _memory,
        _shared_memory,
        _gpu,
        lambda: _ray_address(config, environment),
        lambda: _model(config),
        lambda: _tokenizer(config),
        lambda: _policy(config),
        lambda: _groups(config),
        lambda: _prefill(config),
        lambda: _experts(config),
        lambda: _placement(config),
        lambda: _moves(config),
        lambda: _port(config),
        lambda: keys_finding(config),
        _descriptors,
        _niceness,
        lambda: _hardware(config),
        _current_folder,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    advice = "" if good else "use Python 3.11 or newer"
    return Finding("python", "ok" if good else "error", platform.python_version(), advice)


def _packages() -> Finding:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(
            "packages", "error", f"missing: {', '.join(missing)}", "in a clone: pip install -e ."
        )
    return Finding("packages", "ok", ", ".join(found))


def _cores(config: TandemConfig) -> Finding:
    cores = machine.usable_cores()
    ranks = config.groups.ranks
    found = f"{cores:g} cores for {ranks} ranks of {config.groups.torch_threads} thread(s)"
    if ranks * config.groups.torch_threads > cores:
        return Finding("cores", "warning", found, "ranks share cores: right, but slower")
    return Finding("cores", "ok", found)


def _memory() -> Finding:
    available, total = machine.available_bytes(), machine.total_bytes()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if available < 3 * GIB:
        return Finding("memory", "warning", found, "Ray and four ranks take about 2 GiB")
    return Finding("memory", "ok", found)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "error", "no /dev/shm", "use channel.backend=tcp")
    free = machine.free_bytes(folder)
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB // 2:
        advice = "Ray's object store wants 256 MiB there; docker: --shm-size=1g"
        return Finding("shared memory", "warning", found, advice)
    return Finding("shared memory", "ok", found)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", "ok", "none: CPU ranks, shm or tcp channels")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        from cupy.cuda import nccl

        ready = bool(nccl.available)
    except ImportError:
        ready = False
    if not ready:
        advice = "in a clone, pip install -e '.[cuda]' for NCCL channels between GPUs"
        return Finding("gpu", "warning", f"{', '.join(names)}; no cupy NCCL", advice)
    return Finding("gpu", "ok", f"{', '.join(names)}; cupy NCCL {nccl.get_version()}")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} file descriptors, {hard} at most"
    if soft < MIN_DESCRIPTORS:
        advice = f"each client and each rank takes some: ulimit -n {MIN_DESCRIPTORS} or more"
        return Finding("descriptors", "warning", found, advice)
    return Finding("descriptors", "ok", found)


def _niceness() -> Finding:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        advice = "ranks inherit it, and count as hung when they get no time: start without nice"
        return Finding("niceness", "warning", f"nice {nice}", advice)
    return Finding("niceness", "ok", f"nice {nice}")


def _hardware(config: TandemConfig) -> Finding:
    name = config.planner.hardware
    if not config.planner.enabled or name is None:
        return Finding("hardware", "ok", "no hardware file: the planner learns, or is off")
    try:
        hardware = load_hardware(name)
    except TandemError as error:
        return Finding("hardware", "error", f"planner.hardware: {error.message}")
    return Finding("hardware", "ok", f"{hardware.name}, {hardware.kind}")


def _current_folder() -> Finding:
    names = shadowing(Path.cwd())
    if names:
        found = f"{', '.join(names)}: named as packages of ours"
        advice = "python -m and PYTHONPATH may take them for ours: start elsewhere"
        return Finding("current folder", "warning", found, advice)
    return Finding("current folder", "ok", "nothing here is taken for our packages")


def _ray_address(config: TandemConfig, environment: Mapping[str, str]) -> Finding:
    address = config.groups.address or environment.get("RAY_ADDRESS")
    if not address:
        if environment.get("RAY_AUTH_MODE") == "disabled":
            found = "a local cluster is started without tokens (RAY_AUTH_MODE=disabled)"
            return Finding("ray", "warning", found, NO_TOKENS)
        return Finding("ray", "ok", "no address: a local cluster is started, with tokens")
    if environment.get("RAY_AUTH_MODE") == "disabled":
        found = f"existing cluster at {address}, joined without a token (RAY_AUTH_MODE=disabled)"
        return Finding("ray", "warning", found, NO_TOKENS)
    if environment.get("RAY_AUTH_MODE") is None:
        advice = "clusters that take tokens want RAY_AUTH_MODE=token in this shell"
        return Finding("ray", "warning", f"existing cluster at {address}", advice)
    return Finding("ray", "ok", f"existing cluster at {address}")


def _model(config: TandemConfig) -> Finding:
    try:
        folder = resolve_model_folder(config.model.path)
        spec = check_checkpoint(folder)
    except TandemError as error:
        return Finding("model", "error", error.message)
    dtype = resolve_dtype(spec, config.model.dtype)
    per_token = kv_bytes_per_token(spec, dtype)
    return Finding(
        "model",
        "ok",
        f"{folder.name}: {spec.architecture}, {spec.num_layers} layers, {spec.num_experts} experts "
        f"top-{spec.top_k}, {str(dtype)[6:]}, {per_token} bytes of KV a token",
    )


def _tokenizer(config: TandemConfig) -> Finding:
    try:
        folder = resolve_model_folder(config.model.path)
    except TandemError:
        return Finding("tokenizer", "warning", "not looked at: there is no model folder")
    try:
        text = check_tokenizer(folder)
    except TandemError as error:
        return Finding("tokenizer", "error", error.message)
    found = f"{text.vocab_size} tokens, {'a' if text.has_chat_template else 'no'} chat template"
    if not text.has_chat_template:
        advice = "/v1/chat/completions will answer 400; the other endpoints need no template"
        return Finding("tokenizer", "warning", found, advice)
    return Finding("tokenizer", "ok", found)


def _readable(config: TandemConfig) -> ModelSpec | None:
    """None where there is no such model: `_model` says why."""
    try:
        return check_checkpoint(resolve_model_folder(config.model.path))
    except TandemError:
        return None


def _policy(config: TandemConfig) -> Finding:
    path = config.priority.policy
    try:
        policy = UserPolicy() if path is None else load_policy(path)
    except TandemError as error:
        return Finding("policy", "error", error.message)
    if config.groups.prefill_ranks and config.prefill.experts == "all_to_all":
        advice = "prefill.experts=resident, gathered or streamed where LS requests come, too"
        return Finding("policy", "warning", "all_to_all: workers run batches to their end", advice)
    if path is None:
        return Finding("policy", "ok", "LS by due time, BE in its gaps and by its share")
    if not config.priority.preempt and (policy.pick or policy.serve):
        advice = "pick and serve are asked with priority.preempt=true only"
        return Finding("policy", "warning", f"{path}: tasks run to their end", advice)
    mine = ", ".join(name for name, own in policy._asdict().items() if own is not None)
    return Finding("policy", "ok", f"{path}: its own {mine}")


def _groups(config: TandemConfig) -> Finding:
    attention, experts = config.groups.attention_ranks, config.groups.expert_ranks
    if attention == 0:
        return Finding("groups", "ok", "no attention and expert ranks: prefill workers generate")
    spec = _readable(config)
    if spec is None:
        return Finding("groups", "warning", "not looked at: the model cannot be read")
    try:
        each, all_experts = group_weight_bytes(config, spec)
    except TandemError as error:  # a budget of experts that a token does not fit into
        return Finding("groups", "error", error.message)
    found = (
        f"{attention} attention rank(s), {each / MIB:,.0f} MiB of weights each; "
        f"{experts} expert rank(s), {all_experts / MIB:,.0f} MiB together"
    )
    on_cpu = config.groups.device != "cuda"
    if on_cpu and attention * each + all_experts > machine.available_bytes():
        advice = "more than is free here: more nodes, fewer attention ranks, or a smaller model"
        return Finding("groups", "warning", found, advice)
    return Finding("groups", "ok", found)


def group_weight_bytes(config: TandemConfig, spec: ModelSpec) -> tuple[int, int]:
    """Bytes of weights in each attention rank, and in all expert ranks together. Raises
    ConfigError."""
    dtype, expert_bytes = resolve_dtype(spec, config.model.dtype), _expert_bytes(config, spec)
    ranks = config.groups.expert_ranks
    experts = _placed_experts(config, spec) if ranks else len(spec.moe_layers) * spec.num_experts
    if config.experts.is_bounded and ranks:
        experts = min(experts, ranks * slots_for(config.experts, expert_bytes, spec))
    attention = total_bytes(layout.attention_half_tensors(spec), dtype)
    return attention, experts * expert_bytes


def _placed_experts(config: TandemConfig, spec: ModelSpec) -> int:
    """Slots of the group that has the placement, in all layers together. Raises ConfigError."""
    folder, placing = resolve_model_folder(config.model.path), config.placement
    placement = check_placement_file(config, folder, spec)
    if placement is not None:
        return sum(map(len, placement.expert_of_slot))
    spare = placing.spare_slots * config.groups.expert_ranks if placing.follow != "off" else 0
    return len(spec.moe_layers) * (spec.num_experts + spare)


def _placement(config: TandemConfig) -> Finding:
    """Where the experts are."""
    placing, spec = config.placement, _readable(config)
    if placing.file is None:
        found = "experts in order, each once"
        if placing.follow != "off" and config.groups.expert_ranks:
            found += f"; they follow the traffic, with {placing.spare_slots} spare slots a rank"
        return Finding("placement", "ok", found)
    if spec is None:
        return Finding("placement", "warning", "not looked at: the model cannot be read")
    try:
        slots = _placed_experts(config, spec)
    except TandemError as error:
        return Finding("placement", "error", error.message)
    more = slots - len(spec.moe_layers) * spec.num_experts
    size = more * _expert_bytes(config, spec) / MIB
    return Finding("placement", "ok", f"{placing.file}: {more} replicas, {size:,.0f} MiB")


def _moves(config: TandemConfig) -> Finding:
    """Whether what a move may bring in, and how fast, fits this machine."""
    ranks = config.groups.expert_ranks
    if config.placement.follow == "off" or not ranks:
        return Finding("moves", "ok", "none: experts stay where they are")
    if config.experts.is_bounded:
        return Finding("moves", "ok", "copy nothing: ranks read experts as they are wanted")
    spec = _readable(config)
    if spec is None:
        return Finding("moves", "warning", "not looked at: the model cannot be read")
    try:
        each, slots = _expert_bytes(config, spec), _placed_experts(config, spec)
    except TandemError as error:
        return Finding("moves", "error", error.message)
    moving = Moving(ranks, each, -(-slots // ranks) * each)
    return Finding("moves", *expert_moves(config.placement, moving))


def _prefill(config: TandemConfig) -> Finding:
    workers, kind = config.groups.prefill_ranks, config.prefill.experts
    if workers == 0:
        return Finding("prefill", "ok", "no prefill workers: attention and expert ranks classify")
    spec = _readable(config)
    if spec is None:
        return Finding("prefill", "warning", "not looked at: the model cannot be read")
    try:
        each = prefill_weight_bytes(config, spec)
    except TandemError as error:  # a budget of experts that a token does not fit into
        return Finding("prefill", "error", error.message)
    found = f"{workers} worker(s), experts {kind}: {each / MIB:,.0f} MiB of weights each"
    if workers == 1 and kind in ("gathered", "hybrid", "all_to_all"):
        advice = "one worker has no others to fetch from: prefill.experts=resident or streamed"
        return Finding("prefill", "warning", found, advice)
    if config.groups.device != "cuda" and workers * each > machine.available_bytes():
        advice = "more than is free here: prefill.experts=gathered or streamed, or fewer workers"
        return Finding("prefill", "warning", found, advice)
    return Finding("prefill", "ok", found)


def _experts(config: TandemConfig) -> Finding:
    """What a miss costs where some experts are kept only."""
    is_cached = config.prefill.experts == "cached" and config.groups.prefill_ranks
    if not config.experts.is_bounded or not (is_cached or config.groups.expert_ranks):
        return Finding("experts", "ok", "each worker keeps all of its own")
    spec = _readable(config)
    if spec is None:
        return Finding("experts", "warning", "not looked at: the model cannot be read")
    folder = Path(config.prefill.host_store or tempfile.gettempdir())
    try:
        if runs_on_gpu(config):
            return Finding("experts", *gpu_experts(config, spec, folder))
        expert_bytes = _expert_bytes(config, spec)
        slots = slots_for(config.experts, expert_bytes, spec)
        rate = disk_rate(folder)
    except TandemError as error:  # a budget that a token does not fit into
        return Finding("experts", "error", error.message)
    except OSError as error:
        advice = "set prefill.host_store to a folder that can be written"
        return Finding("experts", "error", f"{folder}: {error.strerror}", advice)
    way = "past the page cache" if rate.is_direct else "through the page cache"
    whole = len(spec.moe_layers) * spec.num_experts
    found = (
        f"a worker keeps {slots} of {whole}; others are read from "
        f"{folder} at {rate.bytes_per_s / 1e9:.1f} GB/s {way}: "
        f"{1e3 * expert_bytes / rate.bytes_per_s:.1f} ms each"
    )
    return Finding("experts", "ok", found)


def prefill_weight_bytes(config: TandemConfig, spec: ModelSpec) -> int:
    """Bytes of weights in a prefill worker's own memory: copies use two layers' buffers."""
    prefill, workers = config.prefill, config.groups.prefill_ranks
    dtype = resolve_dtype(spec, config.model.dtype)
    expert_bytes = layout.expert_elements(spec) * dtype.itemsize
    if prefill.experts == "cached":
        expert_bytes = _expert_bytes(config, spec)
    layer_bytes = spec.num_experts * expert_bytes
    layers = len(spec.moe_layers)
    resident = min(prefill.resident_layers, layers)
    copied = layers - resident
    held = {
        "resident": layers,
        "gathered": resident + min(copied, 2) + copied / workers,
        "streamed": resident + min(copied, 2),
        "hybrid": resident + min(copied, 2) + min(copied, prefill.shard_window) / workers,
        "all_to_all": _lockstep_share(config, spec),
        "cached": 0,
    }[prefill.experts]
    if prefill.experts == "cached":
        held = slots_for(config.experts, expert_bytes, spec) / spec.num_experts
    return total_bytes(layout.attention_half_tensors(spec), dtype) + round(held * layer_bytes)


def _lockstep_share(config: TandemConfig, spec: ModelSpec) -> float:
    """Layers' worth of experts in a worker of all_to_all."""
    slots = len(spec.moe_layers) * spec.num_experts
    if config.placement.file is not None and config.groups.expert_ranks == 0:
        slots = _placed_experts(config, spec)
    return slots / spec.num_experts / config.groups.prefill_ranks


def _expert_bytes(config: TandemConfig, spec: ModelSpec) -> int:
    """Of one, where workers keep as many as there are slots for. Raises CheckpointError."""
    dtype = resolve_dtype(spec, config.model.dtype)
    if config.experts.is_bounded and config.experts.stored:
        checkpoint = Checkpoint(resolve_model_folder(config.model.path))
        return sum(AsStored(checkpoint, spec, dtype).sizes)
    return layout.expert_elements(spec) * dtype.itemsize


def _port(config: TandemConfig) -> Finding:
    try:
        bind(config.http.host, config.http.port).close()
    except TandemError as error:
        return Finding("port", "error", error.message)
    return Finding("port", "ok", f"{config.http.host}:{config.http.port} is free")
