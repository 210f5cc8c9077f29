"""Checks of this machine and a configuration for `tandem doctor`."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from actors.channels.cuda import DEVICE_ENVIRONMENT
from cluster.fleet.hardware import load_hardware
from cluster.fleet.model_folder import check_tokenizer, resolve_model_folder
from cluster.http.server import bind
from cluster.tools.doctor import rank_checks
from cluster.tools.doctor.findings import Finding, check_keys
from contracts import machine
from contracts.config import TandemConfig
from contracts.errors import TandemError
from contracts.import_path import shadowed_packages
from kernels.compiled import code_folder, processor_name
from kernels.linear import HAS_MATRIX_UNITS, decided
from models.decoder.attention import kv_bytes_per_token
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.scheduling.user_policy import UserPolicy, load_policy

PACKAGES = ("ray", "torch", "msgspec", "starlette", "uvicorn", "tokenizers")
MIN_DESCRIPTORS = 4096
GIB = 1 << 30


def report_versions() -> Finding:
    packages = [f"{package} {importlib.metadata.version(package)}" for package in PACKAGES]
    return Finding("versions", "ok", ", ".join([f"Python {platform.python_version()}", *packages]))


def check_cores(config: TandemConfig) -> Finding:
    cores = machine.usable_cores()
    ranks = config.groups.ranks
    found = f"{cores:g} cores for {ranks} ranks of {config.groups.torch_threads} thread(s)"
    if ranks * config.groups.torch_threads > cores:
        return Finding("cores", "warning", found, "ranks share cores: correct, but slower")
    nodes = machine.numa_nodes()
    sets = machine.pinned_cpus(nodes, ranks, config.groups.torch_threads)
    if sets:
        found += f", pinned to {len(sets[0])} CPUs each on {len(nodes)} NUMA node(s)"
    return Finding("cores", "ok", found)


def check_memory() -> Finding:
    available, total = machine.available_bytes(), machine.total_bytes()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if available < 3 * GIB:
        return Finding("memory", "warning", found, "Ray and four ranks take about 2 GiB")
    return Finding("memory", "ok", found)


def check_shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "error", "no /dev/shm", "use channel.backend=tcp")
    free = machine.free_bytes(folder)
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB // 2:
        advice = "Ray's object store needs 256 MiB there; docker: --shm-size=1g"
        return Finding("shared memory", "warning", found, advice)
    return Finding("shared memory", "ok", found)


def check_gpu(config: TandemConfig) -> Finding:
    if config.channel.backend == "ipc":
        found = "channel.backend=ipc: peers read a rank's memory, which ends with its process"
        advice = "a killed rank may corrupt packets in transit: use nccl or shm in production"
        return Finding("gpu", "warning", found, advice)
    if not torch.cuda.is_available():
        return Finding("gpu", "ok", "none: CPU ranks, shm or tcp channels")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    major = str(torch.version.cuda).partition(".")[0]
    advice = f"in a clone: pip install -e '.[cuda{major}]'"
    try:
        from cupy.cuda import nccl, runtime

        version = runtime.runtimeGetVersion() // 1000
    except ImportError:
        return Finding("gpu", "warning", f"{names}; no cupy for channels between GPUs", advice)
    if not nccl.available:
        return Finding("gpu", "warning", f"{names}; no NCCL for channels between nodes", advice)
    if str(version) != major:
        found = f"{names}; torch is built for CUDA {major}, cupy for CUDA {version}"
        return Finding("gpu", "error", found, f"use one major version: {advice}")
    return Finding("gpu", "ok", f"{names}; CUDA {major}, cupy NCCL {nccl.get_version()}")


def check_gpu_compiler(environment: Mapping[str, str]) -> Finding:
    """Report what Triton's kernels need: without it, slower ones of torch take their place."""
    if not torch.cuda.is_available():
        return Finding("gpu kernels", "ok", "none: CPU ranks")
    compiler = environment.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if importlib.util.find_spec("triton") is None or compiler is None:
        missing = "no C compiler" if compiler is None else "no triton"
        advice = "install gcc and the extra cuda12 or cuda13: torch's kernels are slower"
        return Finding("gpu kernels", "error", missing, advice)
    found = f"triton with {compiler}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found += f"; FlashInfer {importlib.metadata.version('flashinfer-python')}"
    return Finding("gpu kernels", "ok", found)


def check_gpu_environment(environment: Mapping[str, str]) -> Finding:
    """Report the settings of CUDA and NCCL that a rank on a GPU uses."""
    used = {name: environment.get(name, value) for name, value in DEVICE_ENVIRONMENT.items()}
    found = ", ".join(f"{name}={value}" for name, value in used.items())
    changed = [name for name, value in used.items() if value != DEVICE_ENVIRONMENT[name]]
    if changed:
        advice = f"Tandem's own value is {DEVICE_ENVIRONMENT[changed[0]]}: unset {changed[0]}"
        return Finding("gpu environment", "warning", found, advice)
    return Finding("gpu environment", "ok", found)


def check_descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} file descriptors, {hard} at most"
    if soft < MIN_DESCRIPTORS:
        advice = f"each client and each rank uses some: ulimit -n {MIN_DESCRIPTORS} or more"
        return Finding("descriptors", "warning", found, advice)
    return Finding("descriptors", "ok", found)


def check_kernels() -> Finding:
    folder, found = code_folder(), f"compiled for {processor_name()}"
    if folder is None:
        advice = "no folder for compiled code: each start compiles for some 15 s; set HOME"
        return Finding("kernels", "warning", found, advice)
    if HAS_MATRIX_UNITS:
        answer = decided(folder)
        products = {None: "not measured yet", True: "oneDNN", False: "panels"}[answer]
        found += f", bfloat16 products: {products}"
    return Finding("kernels", "ok", f"{found}, kept in {folder.parent}")


def check_niceness() -> Finding:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        advice = "ranks inherit it and count as hung without CPU time: start without nice"
        return Finding("niceness", "warning", f"nice {nice}", advice)
    return Finding("niceness", "ok", f"nice {nice}")


def check_current_folder() -> Finding:
    names = shadowed_packages(Path.cwd())
    if names:
        found = f"{', '.join(names)}: named as packages of Tandem"
        advice = "python -m and PYTHONPATH may import them instead: start in another folder"
        return Finding("current folder", "warning", found, advice)
    return Finding("current folder", "ok", "no file here has the name of a package of Tandem")


NO_TOKENS = (
    "Ray listens on all interfaces and runs code for any client: set RAY_AUTH_MODE=token where the "
    "cluster is started and here"
)


def check_config(config: TandemConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Run all checks in order. No check starts a process or uses the network."""
    model, spec = _model(config)
    return [
        report_versions(),
        check_cores(config),
        check_memory(),
        check_shared_memory(),
        check_gpu(config),
        check_gpu_compiler(environment),
        check_gpu_environment(environment),
        _ray_address(config, environment),
        model,
        _tokenizer(config, spec),
        _policy(config),
        *(_rank_check(name, config, spec) for name in rank_checks.CHECKS),
        _port(config),
        check_keys(config),
        check_descriptors(),
        check_kernels(),
        check_niceness(),
        _hardware(config),
        check_current_folder(),
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
