"""Waiting for a GPU."""

from __future__ import annotations

from collections import deque

import torch


def wait_for_device(device: torch.device) -> None:
    """Waits until what the calling thread has queued on `device` is computed. Copies on other
    streams go on. Nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class LaunchLimiter:
    """Keeps the thread that queues work at most `ahead` steps ahead of a GPU: enough to keep that
    busy, and so few that the thread still turns to other things while it computes."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._device, self._ahead = device, ahead
        self._steps: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """The work of a step is queued."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._steps.append(event)
        if len(self._steps) > self._ahead:
            self._steps.popleft().synchronize()  # type: ignore[no-untyped-call]
