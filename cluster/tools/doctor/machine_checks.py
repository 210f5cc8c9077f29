"""Checks of this machine for `tandem doctor`, one finding each."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path

import torch

from cluster.tools.doctor.findings import Finding
from contracts import machine
from contracts.config import TandemConfig
from contracts.import_path import shadowed_packages

PACKAGES = ("ray", "torch", "msgspec", "starlette", "uvicorn", "tokenizers")
MIN_DESCRIPTORS = 4096
GIB = 1 << 30


def python() -> Finding:
    good = sys.version_info >= (3, 11)
    advice = "" if good else "use Python 3.11 or newer"
    return Finding("python", "ok" if good else "error", platform.python_version(), advice)


def packages() -> Finding:
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


def cores(config: TandemConfig) -> Finding:
    cores = machine.usable_cores()
    ranks = config.groups.ranks
    found = f"{cores:g} cores for {ranks} ranks of {config.groups.torch_threads} thread(s)"
    if ranks * config.groups.torch_threads > cores:
        return Finding("cores", "warning", found, "ranks share cores: correct, but slower")
    return Finding("cores", "ok", found)


def memory() -> Finding:
    available, total = machine.available_bytes(), machine.total_bytes()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if available < 3 * GIB:
        return Finding("memory", "warning", found, "Ray and four ranks take about 2 GiB")
    return Finding("memory", "ok", found)


def shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "error", "no /dev/shm", "use channel.backend=tcp")
    free = machine.free_bytes(folder)
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB // 2:
        advice = "Ray's object store needs 256 MiB there; docker: --shm-size=1g"
        return Finding("shared memory", "warning", found, advice)
    return Finding("shared memory", "ok", found)


def gpu(config: TandemConfig) -> Finding:
    if config.channel.backend == "ipc":
        found = "channel.backend=ipc: peers read a rank's memory, which ends with its process"
        advice = "a killed rank may corrupt packets in transit: use nccl or shm in production"
        return Finding("gpu", "warning", found, advice)
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


def descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} file descriptors, {hard} at most"
    if soft < MIN_DESCRIPTORS:
        advice = f"each client and each rank uses some: ulimit -n {MIN_DESCRIPTORS} or more"
        return Finding("descriptors", "warning", found, advice)
    return Finding("descriptors", "ok", found)


def niceness() -> Finding:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        advice = "ranks inherit it and count as hung without CPU time: start without nice"
        return Finding("niceness", "warning", f"nice {nice}", advice)
    return Finding("niceness", "ok", f"nice {nice}")


def current_folder() -> Finding:
    names = shadowed_packages(Path.cwd())
    if names:
        found = f"{', '.join(names)}: named as packages of Tandem"
        advice = "python -m and PYTHONPATH may import them instead: start in another folder"
        return Finding("current folder", "warning", found, advice)
    return Finding("current folder", "ok", "no file here has the name of a package of Tandem")
