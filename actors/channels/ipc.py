"""Two processes on one GPU: the receiver opens the sender's device memory segments.

Allocation, growth, slots and frames are those of shared memory (`shm`, `segments`). The payload
lies on the device, and two moments are the stream's instead of the host's:

- *ready*: `commit` records an interprocess event per slot on the sender's current stream; the
  receiver's current stream waits for it. (Synchronizing before the header would hold the host for
  as long as the expert GEMM that fills the payload runs.)
- *released*: `release` records an event on the caller's current stream; the slot's flag is set
  once that event is reached, so the sender never overwrites what a kernel still reads.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from actors.channels.base import TensorSpec
from actors.channels.cuda import require_cupy
from actors.channels.endpoint import Endpoint
from actors.channels.link import Link, LinkSockets, Views, encode
from actors.channels.listener import listen_unix
from actors.channels.segments import (
    FLAG_BYTES,
    PayloadLocation,
    SegmentMemory,
    check_memfd,
    create_memfd,
    releaser,
)
from actors.channels.shm import Announce, SharedMemoryLink
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerError


class _Raw:
    """Device bytes in the form that torch.as_tensor accepts. torch keeps this object alive."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """Device memory; `free(pointer)` runs when the last tensor in it is gone."""

    def __init__(self, fd: int, pointer: int, num_bytes: int, free: Callable[[int], None]) -> None:
        """Wrap memory under its `torch.cuda.device`. Raises ChannelError."""
        raw = _Raw(pointer, num_bytes)
        weakref.finalize(raw, free, pointer).atexit = False  # the driver frees it then
        self.flags = mmap.mmap(fd, FLAG_BYTES)
        memory = torch.as_tensor(raw, device="cuda")
        if memory.data_ptr() != pointer:
            raise ChannelError(f"torch copied device memory at {pointer:#x} instead of using it")
        self.views = Views(memory)

    def close(self) -> None:
        """Do nothing: the finalizer frees the memory."""


class IpcLink(SharedMemoryLink):
    def __init__(
        self, link_sockets: LinkSockets, config: ChannelConfig, clock: Clock, device: torch.device
    ) -> None:
        super().__init__(link_sockets, config, clock, device)
        self._runtime: Any = require_cupy("ipc").cuda.runtime
        self._ready: dict[tuple[int, int], torch.cuda.Event] = {}  # ours, by segment and slot
        self._peer_ready: dict[tuple[int, int], torch.cuda.Event] = {}
        self._releasing: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def reserve(self, parts: Sequence[TensorSpec]) -> Any:
        self._set_flags()
        return super().reserve(parts)

    def maintain(self, now_s: float) -> None:
        """Set flags. Segments stay: freeing device memory that the peer has open is undefined."""
        self._set_flags()

    def _new_memory(self, number: int, num_bytes: int) -> SegmentMemory:
        fd = create_memfd(0)
        try:
            with torch.cuda.device(self._device):
                pointer = self._runtime.malloc(num_bytes)
                memory = DeviceMemory(fd, pointer, num_bytes, self._runtime.free)
                handle = self._runtime.ipcGetMemHandle(pointer)
            self._frames.send(encode(Announce(number, num_bytes, handle)), fd)
        except RuntimeError as error:
            raise ChannelError(f"no device memory for {num_bytes} bytes: {error}") from None
        finally:
            os.close(fd)
        return memory

    def _map(self, message: Announce) -> SegmentMemory:
        fd = self._frames.take_fd()
        try:
            if not check_memfd(fd, 0):
                raise PeerError(f"{self.peer} sent an invalid segment", self.peer)
            with torch.cuda.device(self._device):
                pointer = self._runtime.ipcOpenMemHandle(message.handle)
                close = self._runtime.ipcCloseMemHandle
                return DeviceMemory(fd, pointer, message.num_bytes, close)
        except RuntimeError as error:
            raise PeerError(f"cannot open memory of {self.peer}: {error}", self.peer) from None
        finally:
            os.close(fd)

    def _mark_ready(self, place: PayloadLocation) -> bytes:
        key = (place.segment, place.slot)
        event = self._ready.get(key)
        new = event is None
        if event is None:
            event = self._ready[key] = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return bytes(event.ipc_handle()) if new else b""  # type: ignore[no-untyped-call]

    def _wait_ready(
        self, place: PayloadLocation, ready: bytes, memory: SegmentMemory
    ) -> Callable[[], None]:
        key = (place.segment, place.slot)
        if ready:
            self._peer_ready[key] = torch.cuda.Event.from_ipc_handle(self._device, ready)  # type: ignore[no-untyped-call]
        event = self._peer_ready.get(key)
        if event is None:
            raise PeerError(f"{self.peer} sent no event for {place}", self.peer)
        torch.cuda.current_stream(self._device).wait_event(event)
        return partial(self._release, releaser(memory, place.slot))

    def _release(self, set_flag: Callable[[], None]) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        self._releasing.append((done, set_flag))
        self._set_flags()

    def _set_flags(self) -> None:
        """Set the flags of reached events. Thread-safe: an entry is removed before its check."""
        for _ in range(len(self._releasing)):
            try:
                entry = self._releasing.popleft()
            except IndexError:  # another thread removed it
                return
            if entry[0].query():  # type: ignore[no-untyped-call]
                entry[1]()
            else:
                self._releasing.append(entry)


class IpcEndpoint(Endpoint):
    """Payloads lie in memory of the GPU that both processes use."""

    backend = "ipc"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_unix()

    def _join(self, link_sockets: LinkSockets) -> Link:
        return IpcLink(link_sockets, self.config, self.clock, self.device)
