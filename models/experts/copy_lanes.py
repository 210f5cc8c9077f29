"""Execution of a copying store's copies: on its thread, or on a CUDA stream.

On a GPU the host queues the compute of layer after layer and the store's thread the copies; the two
streams wait for each other by events:

    compute     |####1####|####2####| |####3###     before 3: until its copy is complete (exposed)
    copies      |==2==|    |=====3====| |==4==      before 4: until the compute of 2 is complete
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from contracts.clock import Clock
from models.experts.device_lanes import has_passed, new_event, new_stream
from models.experts.expert_store import ExpertBuffer, ExpertSource

Observe = Callable[[int, float, float], None]
"""(layer, start_s, end_s) of a copy, on the clock."""


@dataclasses.dataclass(slots=True)
class BufferLease:
    """A buffer; on a GPU, with the events that end queued writes and reads."""

    buffer: ExpertBuffer
    copied: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class CopyLane(Protocol):
    """copied_s: total copy time. exposed_s: time the GPU waited for copies."""

    @property
    def copied_s(self) -> float: ...
    @property
    def exposed_s(self) -> float: ...

    def copy(self, source: ExpertSource, layer: int, lease: BufferLease) -> None:
        """Fill the buffer, or queue it.

        Called by the store's thread; raises the source's errors.
        """

    def acquire(self, lease: BufferLease) -> None:
        """Order the calling thread's following work after the copy."""

    def release(self, lease: BufferLease) -> None:
        """Mark that the calling thread has queued all reads of the buffer."""

    def drain(self) -> None:
        """Wait for queued copies, before buffers and sources are freed."""


def copy_lane(device: torch.device, observe: Observe | None, clock: Clock) -> CopyLane:
    """Create the lane after the buffers. observe: called with every copy."""
    kind = _StreamLane if device.type == "cuda" else _HostLane
    return kind(device, observe, clock)


class _HostLane:
    exposed_s = 0.0

    def __init__(self, device: torch.device, observe: Observe | None, clock: Clock) -> None:
        self.copied_s = 0.0
        self._observe, self._clock = observe, clock

    def copy(self, source: ExpertSource, layer: int, lease: BufferLease) -> None:
        start_s = self._clock()
        source.copy(layer, lease.buffer)
        end_s = self._clock()
        self.copied_s += end_s - start_s
        if self._observe is not None:
            self._observe(layer, start_s, end_s)

    def acquire(self, lease: BufferLease) -> None:
        pass

    release = acquire

    def drain(self) -> None:
        pass


class _Copy(NamedTuple):
    """anchor: an event recorded at anchor_s on the clock."""

    layer: int
    anchor: torch.cuda.Event
    anchor_s: float
    start: torch.cuda.Event
    end: torch.cuda.Event


class _ComputeWait(NamedTuple):
    """Events of the compute stream: at a layer's experts, and once they are present."""

    requested: torch.cuda.Event
    started: torch.cuda.Event


class _StreamLane:
    """Times are measured on the GPU and collected when copies are complete."""

    def __init__(self, device: torch.device, observe: Observe | None, clock: Clock) -> None:
        self._device, self._observe, self._clock = device, observe, clock
        self._stream, self._idle = new_stream(device), new_stream(device)
        # Queued work may still use the buffers' memory.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copies: deque[_Copy] = deque()
        self._waits: deque[_ComputeWait] = deque()
        self._settling = threading.Lock()
        self._copied_s = self._exposed_s = 0.0

    @property
    def copied_s(self) -> float:
        self._settle()
        return self._copied_s

    @property
    def exposed_s(self) -> float:
        self._settle()
        return self._exposed_s

    def copy(self, source: ExpertSource, layer: int, lease: BufferLease) -> None:
        anchor, start, end = (new_event(timed=True) for _ in range(3))
        anchor.record(self._idle)  # passes at once: nothing else is on that stream
        anchor_s = self._clock()
        if lease.used is not None:
            self._stream.wait_event(lease.used)
        start.record(self._stream)
        with torch.cuda.stream(self._stream):
            source.copy(layer, lease.buffer)
        end.record(self._stream)
        lease.copied = end
        self._copies.append(_Copy(layer, anchor, anchor_s, start, end))
        self._settle()

    def acquire(self, lease: BufferLease) -> None:
        compute = torch.cuda.current_stream(self._device)
        requested, started = new_event(timed=True), new_event(timed=True)
        requested.record(compute)
        if lease.copied is not None:
            compute.wait_event(lease.copied)
        started.record(compute)
        self._waits.append(_ComputeWait(requested, started))

    def release(self, lease: BufferLease) -> None:
        lease.used = torch.cuda.current_stream(self._device).record_event()

    def drain(self) -> None:
        self._stream.synchronize()
        self._settle()

    def _settle(self) -> None:
        """Add the times of completed copies and waits."""
        with self._settling:
            while self._waits and has_passed(self._waits[0].started):
                wait = self._waits.popleft()
                self._exposed_s += 1e-3 * wait.requested.elapsed_time(wait.started)
            while self._copies and has_passed(self._copies[0].end):
                copy = self._copies.popleft()
                self._copied_s += 1e-3 * copy.start.elapsed_time(copy.end)
                if self._observe is not None:
                    start_s = copy.anchor_s + 1e-3 * copy.anchor.elapsed_time(copy.start)
                    end_s = copy.anchor_s + 1e-3 * copy.anchor.elapsed_time(copy.end)
                    self._observe(copy.layer, start_s, end_s)
