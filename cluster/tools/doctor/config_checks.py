"""`tandem doctor`: what in this machine or configuration keeps Tandem from running well."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.fleet.hardware import load_hardware
from cluster.fleet.model_folder import check_tokenizer, resolve_model_folder
from cluster.http.server import bind
from cluster.tools.doctor import machine_checks
from cluster.tools.doctor.expert_checks import MoveDemand, expert_moves, gpu_experts, runs_on_gpu
from cluster.tools.doctor.findings import Finding, check_keys
from cluster.tools.doctor.machine_checks import disk_rate
from cluster.tools.doctor.weight_bytes import (
    bytes_per_expert,
    group_weight_bytes,
    placed_experts,
    prefill_weight_bytes,
)
from contracts import machine
from contracts.config import TandemConfig
from contracts.errors import TandemError
from models.decoder.kv_pool import kv_bytes_per_token
from models.experts.slot_budget import slot_count
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.scheduling.user_policy import UserPolicy, load_policy

NO_TOKENS = (
    "Ray listens on all interfaces and runs code for whoever may connect: RAY_AUTH_MODE=token "
    "where the cluster is started and here"
)
MIB = 1 << 20


def check_config(config: TandemConfig, environment: Mapping[str, str]) -> list[Finding]:
    """All checks, in order. None of them starts anything or waits for the network."""
    checks: list[Callable[[], Finding]] = [
        machine_checks.python,
        machine_checks.packages,
        lambda: machine_checks.cores(config),
        machine_checks.memory,
        machine_checks.shared_memory,
        lambda: machine_checks.gpu(config),
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
        lambda: check_keys(config),
        machine_checks.descriptors,
        machine_checks.niceness,
        lambda: _hardware(config),
        machine_checks.current_folder,
    ]
    return [check() for check in checks]


def _hardware(config: TandemConfig) -> Finding:
    name = config.planner.hardware
    if not config.planner.enabled or name is None:
        return Finding("hardware", "ok", "no hardware file: the planner learns, or is off")
    try:
        hardware = load_hardware(name)
    except TandemError as error:
        return Finding("hardware", "error", f"planner.hardware: {error.message}")
    return Finding("hardware", "ok", f"{hardware.name}, {hardware.kind}")


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


def _model_spec(config: TandemConfig) -> ModelSpec | None:
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
    overrides = ", ".join(name for name, own in policy._asdict().items() if own is not None)
    return Finding("policy", "ok", f"{path}: its own {overrides}")


def _groups(config: TandemConfig) -> Finding:
    attention, experts = config.groups.attention_ranks, config.groups.expert_ranks
    if attention == 0:
        return Finding("groups", "ok", "no attention and expert ranks: prefill workers generate")
    spec = _model_spec(config)
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


def _placement(config: TandemConfig) -> Finding:
    """Where the experts are."""
    placing, spec = config.placement, _model_spec(config)
    if placing.file is None:
        found = "experts in order, each once"
        if placing.rebalance != "off" and config.groups.expert_ranks:
            found += f"; they follow the traffic, with {placing.spare_slots} spare slots a rank"
        return Finding("placement", "ok", found)
    if spec is None:
        return Finding("placement", "warning", "not looked at: the model cannot be read")
    try:
        slots = placed_experts(config, spec)
    except TandemError as error:
        return Finding("placement", "error", error.message)
    more = slots - len(spec.moe_layers) * spec.num_experts
    size = more * bytes_per_expert(config, spec) / MIB
    return Finding("placement", "ok", f"{placing.file}: {more} replicas, {size:,.0f} MiB")


def _moves(config: TandemConfig) -> Finding:
    """Whether what a move may bring in, and how fast, fits this machine."""
    ranks = config.groups.expert_ranks
    if config.placement.rebalance == "off" or not ranks:
        return Finding("moves", "ok", "none: experts stay where they are")
    if config.experts.is_bounded:
        return Finding("moves", "ok", "copy nothing: ranks read experts as they are wanted")
    spec = _model_spec(config)
    if spec is None:
        return Finding("moves", "warning", "not looked at: the model cannot be read")
    try:
        each, slots = bytes_per_expert(config, spec), placed_experts(config, spec)
    except TandemError as error:
        return Finding("moves", "error", error.message)
    moving = MoveDemand(ranks, each, -(-slots // ranks) * each)
    return Finding("moves", *expert_moves(config.placement, moving))


def _prefill(config: TandemConfig) -> Finding:
    workers, kind = config.groups.prefill_ranks, config.prefill.experts
    if workers == 0:
        return Finding("prefill", "ok", "no prefill workers: attention and expert ranks classify")
    spec = _model_spec(config)
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
    spec = _model_spec(config)
    if spec is None:
        return Finding("experts", "warning", "not looked at: the model cannot be read")
    folder = Path(config.prefill.host_store or tempfile.gettempdir())
    try:
        if runs_on_gpu(config):
            return Finding("experts", *gpu_experts(config, spec, folder))
        expert_bytes = bytes_per_expert(config, spec)
        slots = slot_count(config.experts, expert_bytes, spec)
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


def _port(config: TandemConfig) -> Finding:
    try:
        bind(config.http.host, config.http.port).close()
    except TandemError as error:
        return Finding("port", "error", error.message)
    return Finding("port", "ok", f"{config.http.host}:{config.http.port} is free")
