"""Synchronisation with a GPU."""

from __future__ import annotations

from collections import deque

import torch


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
