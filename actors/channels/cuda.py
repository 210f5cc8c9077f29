"""Common parts of the GPU channels: memory, order of work on the device, settings, checks.

A payload is announced to its receiver when the work that fills it has completed (`ReadyQueue`), and
its memory is used again when the work that reads it has (`ReleaseQueue`). The host observes both,
so no stream waits for another one: transfers and compute overlap, whatever is queued.
"""

from __future__ import annotations

import abc
import importlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from actors.channels.base import TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.link import Link, PayloadLayout
from actors.channels.shm import FLAG_BYTES, SegmentAllocator, SegmentMemory, releaser
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.requests import Priority

INSTALL = f"in a clone: pip install -e '.[cuda{(torch.version.cuda or '12').partition('.')[0]}]'"
TRANSFERS_PER_CLASS: Final = 4  # under way at a time, of one rank
COPY_POLL_S: Final = 1e-3  # between two looks at a copy that a thread waits for
DEVICE_ENVIRONMENT: Final = {
    # A kernel's first use would otherwise wait for the whole device, transfers included.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams that share a hardware queue wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # At most 2 classes * TRANSFERS_PER_CLASS transfers occupy that many thread blocks each.
    "NCCL_MAX_CTAS": "4",
    # Memory that grows is mapped, not freed and allocated anew, which would wait for the device.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Environment of ranks on GPUs, unless it is set: CUDA and NCCL read it when they start."""

_Item = TypeVar("_Item")


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


def has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event behind all that is queued on `stream`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def wait_for_stream(stream: torch.cuda.Stream, timeout_s: float, what: str) -> None:
    """Sleep until all that is queued on `stream` has completed. Raises ChannelError."""
    end_s, done = monotonic_s() + timeout_s, recorded(stream)
    while not has_passed(done):
        if monotonic_s() > end_s:
            raise ChannelError(f"{what}: the GPU has not completed it in {timeout_s:g} s")
        time.sleep(COPY_POLL_S)


def device_identity(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def empty_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class ReadyQueue(Generic[_Item]):
    """Payloads whose filling is queued on the current stream, in order within each class."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filling: tuple[deque[tuple[torch.cuda.Event, _Item]], ...] = tuple(
            deque() for _ in Priority
        )

    def add(self, priority: Priority, item: _Item) -> None:
        event = recorded(torch.cuda.current_stream(self._device))
        self._filling[priority].append((event, item))

    def take(self, priority: Priority) -> Iterator[_Item]:
        """Remove and yield the payloads that are filled."""
        filling = self._filling[priority]
        while filling and has_passed(filling[0][0]):
            yield filling.popleft()[1]

    @property
    def is_empty(self) -> bool:
        return not any(self._filling)

    @property
    def has_ready(self) -> bool:
        return any(filling and has_passed(filling[0][0]) for filling in self._filling)

    def clear(self) -> None:
        for filling in self._filling:
            filling.clear()


class ReleaseQueue:
    """Actions that follow the work queued at the time of `add`. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def add(self, action: Callable[[], None]) -> None:
        self._waiting.append((recorded(torch.cuda.current_stream(self._device)), action))
        self.settle()

    def settle(self) -> None:
        """Run the actions whose events are reached: an entry is removed before its check."""
        for _ in range(len(self._waiting)):
            try:
                entry = self._waiting.popleft()
            except IndexError:  # another thread removed it
                return
            if has_passed(entry[0]):
                entry[1]()
            else:
                self._waiting.append(entry)


class DeviceBuffer(NamedTuple):
    """Device memory of one payload. span: its bytes, those between tensors included."""

    tensors: Sequence[torch.Tensor]
    span: torch.Tensor
    free: Callable[[], None]


class DeviceBuffers:
    """Persistent device memory of one link.

    stream: has no work of its own. Its memory comes from no other stream's freed tensors, which
    queued work may still use.
    """

    def __init__(self, segment_bytes: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self.segments = SegmentAllocator(segment_bytes, self._new_memory)
        self.releases = ReleaseQueue(device)

    def allocate(self, parts: Sequence[TensorSpec], layout: PayloadLayout) -> DeviceBuffer:
        """Return memory for a payload. Raises ChannelError."""
        self.releases.settle()
        place = self.segments.allocate(layout.num_bytes)
        memory = self.segments.memory(place.segment)
        end = place.offset_bytes + layout.num_bytes
        return DeviceBuffer(
            memory.views.cut(parts, layout, place.offset_bytes),
            memory.views.memory[place.offset_bytes : end],
            releaser(memory, place.slot),
        )

    def release(self, buffer: DeviceBuffer) -> None:
        """Free a buffer once the work queued so far has completed. Thread-safe."""
        self.releases.add(buffer.free)

    def _new_memory(self, number: int, num_bytes: int) -> SegmentMemory:
        try:
            with torch.cuda.stream(self._stream):
                memory = empty_bytes(num_bytes, self._device)
            return SegmentMemory(memory, bytearray(FLAG_BYTES))
        except RuntimeError as error:
            raise ChannelError(f"no device memory for {num_bytes} bytes: {error}") from None


class TransferStreams:
    """Streams of one rank's transfers: at most TRANSFERS_PER_CLASS are in use for each class.

    Few, so that each has a hardware queue of its own and transfers never occupy all processors.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = new_stream(device)
        self._free = tuple(
            [
                new_stream(device, -1 if each is Priority.LS else 0)
                for _ in range(TRANSFERS_PER_CLASS)
            ]
            for each in Priority
        )
        self._turns = itertools.count()
        self.short = [False] * len(Priority)  # by class: a transfer waits for a stream

    def acquire(self, priority: Priority) -> torch.cuda.Stream | None:
        free = self._free[priority]
        self.short[priority] = not free
        return free.pop() if free else None

    def has_free(self, priority: Priority) -> bool:
        return bool(self._free[priority])

    def share(self, priority: Priority) -> torch.cuda.Stream:
        """Return a stream for copies, which wait for no other process: in turn. Thread-safe."""
        free = self._free[priority]
        return free[next(self._turns) % len(free)]

    def release(self, priority: Priority, stream: torch.cuda.Stream) -> None:
        self._free[priority].append(stream)


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return stream


class DeviceEndpoint(Endpoint, abc.ABC):
    """Endpoint of payloads in this rank's GPU memory, filled and read on the current stream."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.streams = TransferStreams(self.device)

    def _polled_links(self) -> list[Link]:
        return [link for link in self._links.values() if link.needs_polling]
