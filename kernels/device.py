"""Choice between the host's and the device's code, synchronisation and times of a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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


_ANCHOR_PERIOD_S = 1.0  # between two comparisons of the device's clock with the host's

UseTimes = Callable[[float, float], None]
"""(start_s, end_s) of work, on the host's clock."""


def wait_for_device(device: torch.device) -> None:
    """Wait for the calling thread's work on `device`, not for copies on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class GpuMemory:
    """Memory of a GPU, as torch allocates it."""

    @staticmethod
    def of(device: torch.device) -> GpuMemory | None:
        return GpuMemory(device) if device.type == "cuda" else None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """Return the bytes that nothing uses, also those that torch keeps for later."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the largest number of bytes that `run` has in use at a time."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device)) - before


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


class HostTimes:
    """Times of a thread whose work ends where its calls return."""

    def mark(self, now_s: float) -> float:
        """Return a point in the thread's work, at host time now_s."""
        return now_s

    def measure(self, start_s: float, end_s: float, use: UseTimes) -> None:
        """Call `use` with the times at which the work reached two marks."""
        use(start_s, end_s)

    def settle(self) -> None:
        """Call those whose marks have been reached."""


class TimeMark(float):
    """A host time, and the event that was recorded then on the device."""

    event: torch.cuda.Event
    anchor: tuple[torch.cuda.Event, float]


class DeviceTimes(HostTimes):
    """Times on the device. They are known later: `use` is called by a later call, in order.

    A host returns from a launch long before the device has run it. Marks are events on the current
    stream; their times are those since an event on an idle stream, whose host time is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._waiting: deque[tuple[TimeMark, TimeMark, UseTimes]] = deque()

    def mark(self, now_s: float) -> float:
        if self._anchor is None or now_s - self._anchor[1] > _ANCHOR_PERIOD_S:
            self._anchor = self._record(self._idle), now_s
        mark = TimeMark(now_s)
        mark.event = self._record(torch.cuda.current_stream(self._device))
        mark.anchor = self._anchor
        self.settle()
        return mark

    def measure(self, start_s: float, end_s: float, use: UseTimes) -> None:
        if isinstance(start_s, TimeMark) and isinstance(end_s, TimeMark):
            self._waiting.append((start_s, end_s, use))
        else:  # a time that no work on the device ends at
            use(start_s, end_s)
        self.settle()

    def settle(self) -> None:
        while self._waiting and self._waiting[0][1].event.query():  # type: ignore[no-untyped-call]
            start, end, use = self._waiting.popleft()
            use(_device_time(start), _device_time(end))

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _device_time(mark: TimeMark) -> float:
    event, since_s = mark.anchor
    return float(since_s + 1e-3 * event.elapsed_time(mark.event))  # type: ignore[no-untyped-call]


def work_times(device: torch.device) -> HostTimes:
    return DeviceTimes(device) if device.type == "cuda" else HostTimes()
