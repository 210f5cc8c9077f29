"""Checks of this machine and a configuration for `tandem doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.fleet.hardware import load_hardware
from cluster.fleet.model_folder import check_tokenizer, resolve_model_folder
from cluster.http.server import bind
from cluster.tools.doctor import machine_checks, rank_checks
from cluster.tools.doctor.findings import Finding, check_keys
from contracts.config import TandemConfig
from contracts.errors import TandemError
from models.decoder.attention import kv_bytes_per_token
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.scheduling.user_policy import UserPolicy, load_policy

NO_TOKENS = (
    "Ray listens on all interfaces and runs code for any client: set RAY_AUTH_MODE=token where the "
    "cluster is started and here"
)


def check_config(config: TandemConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Run all checks in order. No check starts a process or uses the network."""
    model, spec = _model(config)
    return [
        machine_checks.python(),
        machine_checks.packages(),
        machine_checks.cores(config),
        machine_checks.memory(),
        machine_checks.shared_memory(),
        machine_checks.gpu(config),
        _ray_address(config, environment),
        model,
        _tokenizer(config, spec),
        _policy(config),
        *(_rank_check(name, config, spec) for name in rank_checks.CHECKS),
        _port(config),
        check_keys(config),
        machine_checks.descriptors(),
        machine_checks.niceness(),
        _hardware(config),
        machine_checks.current_folder(),
    ]


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
    address, mode = (
        config.groups.address or environment.get("RAY_ADDRESS"),
        environment.get("RAY_AUTH_MODE"),
    )
    if mode == "disabled":
        found = f"existing cluster at {address}, joined" if address else "a local cluster starts"
        return Finding(
            "ray", "warning", f"{found} without tokens (RAY_AUTH_MODE={mode})", NO_TOKENS
        )
    if not address:
        return Finding("ray", "ok", "no address: a local cluster starts, with tokens")
    found = f"existing cluster at {address}"
    if mode is None:
        advice = "a cluster with token authentication needs RAY_AUTH_MODE=token in this shell"
        return Finding("ray", "warning", found, advice)
    return Finding("ray", "ok", found)


def _model(config: TandemConfig) -> tuple[Finding, ModelSpec | None]:
    try:
        folder = resolve_model_folder(config.model.path)
        spec = check_checkpoint(folder)
    except TandemError as error:
        return Finding("model", "error", error.message), None
    dtype = resolve_dtype(spec, config.model.dtype)
    found = (
        f"{folder.name}: {spec.architecture}, {spec.num_layers} layers, {spec.num_experts} experts "
        f"top-{spec.top_k}, {str(dtype)[6:]}, {kv_bytes_per_token(spec, dtype)} bytes of KV a token"
    )
    return Finding("model", "ok", found), spec


def _tokenizer(config: TandemConfig, spec: ModelSpec | None) -> Finding:
    if spec is None:
        return Finding("tokenizer", "warning", "not checked: the model cannot be read")
    try:
        text = check_tokenizer(resolve_model_folder(config.model.path))
    except TandemError as error:
        return Finding("tokenizer", "error", error.message)
    found = f"{text.vocab_size} tokens, {'a' if text.has_chat_template else 'no'} chat template"
    if not text.has_chat_template:
        advice = "/v1/chat/completions will answer 400; the other endpoints need no template"
        return Finding("tokenizer", "warning", found, advice)
    return Finding("tokenizer", "ok", found)


def _policy(config: TandemConfig) -> Finding:
    path = config.priority.policy
    try:
        policy = UserPolicy() if path is None else load_policy(path)
    except TandemError as error:
        return Finding("policy", "error", error.message)
    if config.groups.prefill_ranks and config.prefill.experts == "all_to_all":
        advice = "set prefill.experts=resident, gathered or streamed where LS requests arrive too"
        return Finding("policy", "warning", "all_to_all: workers run batches to their end", advice)
    if path is None:
        return Finding("policy", "ok", "LS by due time, BE in its gaps and by its share")
    if not config.priority.preempt and (policy.pick or policy.serve):
        advice = "pick and serve are called with priority.preempt=true only"
        return Finding("policy", "warning", f"{path}: tasks run to their end", advice)
    overrides = ", ".join(name for name, own in policy._asdict().items() if own is not None)
    return Finding("policy", "ok", f"{path}: overrides {overrides}")


def _rank_check(name: str, config: TandemConfig, spec: ModelSpec | None) -> Finding:
    if spec is None:
        return Finding(name, "warning", "not checked: the model cannot be read")
    try:
        return Finding(name, *rank_checks.CHECKS[name](config, spec))
    except TandemError as error:
        return Finding(name, "error", error.message)


def _port(config: TandemConfig) -> Finding:
    try:
        bind(config.http.host, config.http.port).close()
    except TandemError as error:
        return Finding("port", "error", error.message)
    return Finding("port", "ok", f"{config.http.host}:{config.http.port} is free")
