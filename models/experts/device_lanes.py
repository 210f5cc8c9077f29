"""Queues of a device: compute, copies of experts to it, and copies of ids to the host.

    compute   |##0##|  |#####1#####|        |##2##|     `mark`: all that is queued so far
    copies       |==a==|==b==|  |==c==|                 `wait`: following compute waits
    ids            |0|         |1|                      `fetch`: to the host, which polls or waits

The host waits only for ids. Copies and compute each run in the order in which they are queued. A
lane is used by one thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from contracts.clock import Clock, monotonic_s

Observe = Callable[[float, float], None]
"""(start_s, end_s) of copies, on the clock."""


class Mark(NamedTuple):
    """A point in the order of the copies, or of the compute. Later points have larger numbers."""

    number: int
    event: Any = None


class Arrival(Protocol):
    """A tensor that is copied to the host. tensor: valid once `is_ready`."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def tensor(self) -> Tensor: ...


def device_lane(device: torch.device) -> DeviceLane:
    """Create the lane after the memory that it copies to."""
    return CudaLane(device) if device.type == "cuda" else InlineLane()


def _copy_all(stored: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for source, target in zip(stored, into, strict=True):
        target.copy_(source, non_blocking=True)


class _Fetched(NamedTuple):
    """event: None: the tensor is on the host."""

    tensor: Tensor
    event: torch.cuda.Event | None

    @property
    def is_ready(self) -> bool:
        return self.event is None or has_passed(self.event)


class InlineLane:
    """Synchronous lane of a CPU: what a method queues has happened when it returns.

    Totals of copies: copied_s, copies. exposed_s: time that compute waited for copies.
    """

    exposed_s = 0.0

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.copied_s, self.copies = 0.0, 0

    def copy(self, stored: Sequence[Tensor], into: Sequence[Tensor], after: Mark | None) -> Mark:
        """Queue a copy from host memory that starts after the mark `after` of the compute."""
        return self.run(partial(_copy_all, stored, into), after)

    def run(
        self, copies: Callable[[], None], after: Mark | None, observe: Observe | None = None
    ) -> Mark:
        start_s = monotonic_s()
        copies()
        end_s = monotonic_s()
        self.copied_s += end_s - start_s
        self.copies += 1
        if observe is not None:
            observe(start_s, end_s)
        return self.mark()

    def mark(self) -> Mark:
        """Return a mark after all queued compute."""
        return Mark(next(self._numbers))

    def wait(self, copied: Mark) -> None:
        """Order following compute after that copy and all earlier ones."""

    def host_wait(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_passed(self, mark: Mark) -> bool:
        return True

    def fetch(self, tensor: Tensor, *, is_complete: bool = False) -> Arrival:
        """Queue a copy to the host, after the queued compute unless the tensor is complete."""
        return _Fetched(tensor, None)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device, for following compute."""
        return tensor

    def drain(self) -> None:
        """Wait for all copies, before memory is freed."""


_Span = tuple[torch.cuda.Event, torch.cuda.Event]


class _Copies(NamedTuple):
    """Queued copies. anchor: an event recorded at anchor_s on the clock, to observe them."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    anchor: torch.cuda.Event
    anchor_s: float
    observe: Observe | None


class CudaLane:
    """Times are measured on the GPU when work is complete. A second thread may use `run`."""

    def __init__(self, device: torch.device, clock: Clock = monotonic_s) -> None:
        self._device, self._clock, self._numbers = device, clock, itertools.count(1)
        self._copying, self._fetching, self._idle = (new_stream(device) for _ in range(3))
        # Queued work may still use the memory.
        self._copying.wait_stream(torch.cuda.current_stream(device))
        self._copied_s, self._copies, self._exposed_s = 0.0, 0, 0.0
        self._in_flight: deque[_Copies] = deque()
        self._waits: deque[_Span] = deque()
        self._settling = threading.Lock()

    @property
    def copied_s(self) -> float:
        self._settle()
        return self._copied_s

    @property
    def copies(self) -> int:
        self._settle()
        return self._copies

    @property
    def exposed_s(self) -> float:
        self._settle()
        return self._exposed_s

    def copy(self, stored: Sequence[Tensor], into: Sequence[Tensor], after: Mark | None) -> Mark:
        return self.run(partial(_copy_all, stored, into), after)

    def run(
        self, copies: Callable[[], None], after: Mark | None, observe: Observe | None = None
    ) -> Mark:
        """Queue `copies` after the mark `after` of the compute. observe: called once complete."""
        start, end, anchor = (new_event(timed=True) for _ in range(3))
        if observe is not None:
            anchor.record(self._idle)  # passes at once: nothing else is on that stream
        anchor_s = self._clock()
        if after is not None and not has_passed(after.event):
            self._copying.wait_event(after.event)
        start.record(self._copying)
        with torch.cuda.stream(self._copying):
            copies()
        end.record(self._copying)
        self._in_flight.append(_Copies(start, end, anchor, anchor_s, observe))
        if observe is not None:
            self._settle()
        return Mark(next(self._numbers), end)

    def mark(self) -> Mark:
        event = new_event()
        event.record(torch.cuda.current_stream(self._device))
        return Mark(next(self._numbers), event)

    def wait(self, copied: Mark) -> None:
        if has_passed(copied.event):
            return
        compute = torch.cuda.current_stream(self._device)
        requested, started = new_event(timed=True), new_event(timed=True)
        requested.record(compute)
        compute.wait_event(copied.event)
        started.record(compute)
        self._waits.append((requested, started))

    @contextmanager
    def host_wait(self) -> Iterator[None]:
        """Count the time that the device has nothing to compute while the host waits for copies."""
        compute = torch.cuda.current_stream(self._device)
        idle_from, idle_until = new_event(timed=True), new_event(timed=True)
        idle_from.record(compute)
        yield
        idle_until.record(compute)
        self._waits.append((idle_from, idle_until))

    def has_passed(self, mark: Mark) -> bool:
        return has_passed(mark.event)

    def fetch(self, tensor: Tensor, *, is_complete: bool = False) -> _Fetched:
        arrived = new_event()
        if not is_complete:
            self._fetching.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._fetching):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._fetching)  # keeps its memory until the copy ends
        arrived.record(self._fetching)
        return _Fetched(host, arrived)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def drain(self) -> None:
        self._copying.synchronize()
        self._fetching.synchronize()
        self._settle()

    def _settle(self) -> None:
        """Add the times of completed copies and waits."""
        with self._settling:
            while self._in_flight and has_passed(self._in_flight[0].end):
                start, end, anchor, anchor_s, observe = self._in_flight.popleft()
                self._copied_s += 1e-3 * start.elapsed_time(end)
                self._copies += 1
                if observe is not None:
                    observe(
                        anchor_s + 1e-3 * anchor.elapsed_time(start),
                        anchor_s + 1e-3 * anchor.elapsed_time(end),
                    )
            while self._waits and has_passed(self._waits[0][1]):
                requested, started = self._waits.popleft()
                self._exposed_s += 1e-3 * requested.elapsed_time(started)


DeviceLane = CudaLane | InlineLane


def new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def new_event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
