"""What a device does at best: products, and copies from the host's memory."""

from __future__ import annotations

import time

import torch

from kernels.device import finish
from kernels.linear import Linear
from models.expert_layout import ExpertLayout
from models.expert_store import ExpertBuffer
from models.host_experts import HostSource

_GPU_SIZE, _CPU_SIZE = 8192, 512
_ROUNDS, _PRODUCTS = 10, 8
_COPIES = 4


def gemm_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a large product of random matrices (zeros and ones take less power), in the best of ten
    rounds of eight: rates of the model are held against it."""
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = Linear(weight)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        finish(device)
        start_s = time.monotonic()
        for _ in range(_PRODUCTS):
            product(x)
        finish(device)
        best_s = min(best_s, time.monotonic() - start_s)
    return 2.0 * size**3 * _PRODUCTS / best_s


def copy_bytes_per_s(host: HostSource, layout: ExpertLayout) -> float:
    """Of a layer's experts, into a buffer on the device, alone: the best of some."""
    buffer, device = ExpertBuffer(layout), layout.device
    best_s = float("inf")
    for layer in (layout.spec.moe_layers * _COPIES)[:_COPIES]:
        finish(device)
        start_s = time.monotonic()
        host.copy(layer, buffer)
        finish(device)
        best_s = min(best_s, time.monotonic() - start_s)
    return buffer.num_bytes / best_s


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated on a GPU since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
