"""Choice between the host's and the device's code, and synchronisation with a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ACCELERATORS = frozenset(("cuda", "meta"))
"""Types of devices on which nothing is read by the host. Tests add "cpu"."""


def runs_on_device(device: torch.device) -> bool:
    """Return whether work on `device` is queued, so that the host must not wait for values."""
    return device.type in ACCELERATORS


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of one dtype on `device`.

    A device gets them by one copy from pinned memory, which the host does not wait for.
    """
    if not runs_on_device(device):
        return [torch.from_numpy(array) for array in arrays]
    joined = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        joined = joined.pin_memory()
    joined = joined.to(device, non_blocking=True)
    parts = torch.split(joined, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def wait_for_device(device: torch.device) -> None:
    """Wait for the calling thread's work on `device`, not for copies on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class LaunchLimiter:
    """Keeps the calling thread at most `ahead` steps ahead of a GPU, and so responsive."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._device, self._ahead = device, ahead
        self._steps: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Record that a step's work is queued."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._steps.append(event)
        if len(self._steps) > self._ahead:
            self._steps.popleft().synchronize()  # type: ignore[no-untyped-call]
