"""What a device does at best: copies from the host's memory; and the memory that it used."""

from __future__ import annotations

import time

import torch

from kernels.device import finish
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertBuffer
from models.experts.host_experts import HostSource

_COPIES = 4


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
