"""Waiting for a GPU."""

from __future__ import annotations

import torch


def finish(device: torch.device) -> None:
    """Waits until what the calling thread has queued on `device` is computed. Copies on other
    streams go on. Nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
