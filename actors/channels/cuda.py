"""Checks for cupy and NCCL."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from contracts.errors import ChannelError

INSTALL = "in a clone: pip install -e '.[cuda]'"


def require_cupy(backend: str) -> Any:
    """Return the cupy module on a machine with a GPU. Raises ChannelError."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        raise ChannelError(f"channel.backend={backend} needs cupy: {INSTALL}") from None
    if not cupy.is_available():
        raise ChannelError(f"channel.backend={backend} needs a CUDA device: cupy finds none")
    return cupy


def require_nccl() -> Any:
    """Return cupy's NCCL module. Raises ChannelError."""
    require_cupy("nccl")
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:  # a stub where the NCCL library is missing
        raise ChannelError(f"channel.backend=nccl needs the NCCL library: {INSTALL}")
    return nccl


def with_device_index(device: torch.device) -> torch.device:
    """Return `device` with an index: plain "cuda" means the calling thread's current device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
