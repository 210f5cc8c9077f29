"""What a device does at best: copies from the host's memory, and within its own; and the memory
that it used."""

import argparse
import time

import torch

from benchmarks.support.random_in_memory import SHAPES
from kernels.device import wait_for_device
from models.experts.device_lanes import DeviceLane
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.host_experts import ExpertMemory, HostSource

_COPIES = 4
_EXPERTS = 64
_LARGE_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}


def add_device_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Options of all benchmarks on a GPU."""
    add, there = parser.add_argument, torch.cuda.is_available()
    add("--device", default="cuda:0" if there else "cpu", help="cuda:0, or cpu")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--shape", default="30b" if there else "small", choices=tuple(SHAPES))
    add("--rounds", type=int, default=rounds)


def add_run_options(parser: argparse.ArgumentParser, limit_s: float) -> None:
    """Options of benchmarks of whole models."""
    add = parser.add_argument
    add("--layers", type=int, help="at most (default: the shape's)")
    add("--limit-s", type=float, default=limit_s, help="no further rounds after this time")
    add("--threads", type=int, help="of the host")


def copy_bytes_per_s(host: HostSource, layout: ExpertLayout) -> float:
    """Of a layer's experts, into a buffer on the device, alone: the best of some."""
    buffer, device = ExpertBuffer(layout), layout.device
    best_s = float("inf")
    for layer in (layout.spec.moe_layers * _COPIES)[:_COPIES]:
        wait_for_device(device)
        start_s = time.monotonic()
        host.copy(layer, buffer)
        wait_for_device(device)
        best_s = min(best_s, time.monotonic() - start_s)
    return buffer.num_bytes / best_s


def expert_copies(memory: ExpertMemory, layout: ExpertLayout, lane: DeviceLane) -> float:
    """Bytes/s of experts into one slot, as a cache copies them, with nothing between them."""
    slot, experts = ExpertBuffer(layout, 1).part(0, 1), min(_EXPERTS, layout.spec.num_experts)
    layer, best_s = layout.spec.moe_layers[0], float("inf")
    for _ in range(_COPIES):
        wait_for_device(layout.device)
        start_s = time.monotonic()
        for expert in range(experts):
            lane.copy(memory.expert(layer, expert), slot, None)
        lane.drain()
        best_s = min(best_s, time.monotonic() - start_s)
    return experts * layout.num_bytes(1) / best_s


def memory_bytes_per_s(device: torch.device) -> float:
    """Read and written by a copy within the device's memory."""
    source = torch.zeros(_LARGE_BYTES[device.type], dtype=torch.uint8, device=device)
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(_COPIES):
        wait_for_device(device)
        start_s = time.monotonic()
        for _ in range(_COPIES):
            target.copy_(source)
        wait_for_device(device)
        best_s = min(best_s, (time.monotonic() - start_s) / _COPIES)
    return 2 * source.nbytes / best_s


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated on a GPU since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
