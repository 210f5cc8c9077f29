"""Processes on the GPUs of one node: the receiver opens the sender's device memory segments.

Allocation, growth, slots and frames are those of shared memory (`shm`, `segments`). The payload
lies on the sender's device. A receiver on the same GPU reads it there. One on another GPU copies it
to its own memory by a copy engine: no processor of either GPU takes part, and no kernel waits for
the other process.

- *ready*: the frame leaves when the work that fills the payload has completed (`ReadyQueue`);
- *copied*: a packet is delivered only if its sender was not ending when the copy was complete, as
  the driver may free the memory of a killed process;
- *released*: the slot's flag is set once the kernels that read the payload, or its copy, have
  completed, so the sender never overwrites what is still read.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec, connection_closed
from actors.channels.cuda import (
    DeviceBuffers,
    DeviceEndpoint,
    ReadyQueue,
    TransferStreams,
    device_identity,
    has_passed,
    recorded,
    require_cupy,
)
from actors.channels.link import Link, LinkSockets, PayloadLayout, Reservation, encode, lay_out
from actors.channels.listener import listen_unix
from actors.channels.shm import (
    FLAG_BYTES,
    Announce,
    Payload,
    SegmentMemory,
    SharedMemoryLink,
    check_memfd,
    create_memfd,
    releaser,
)
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerError
from contracts.requests import Priority


class _Raw:
    """Device bytes in the form that torch.as_tensor accepts. torch keeps this object alive."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def device_bytes(pointer: int, num_bytes: int, free: Callable[[int], None]) -> torch.Tensor:
    """Return memory under its `torch.cuda.device`. Raises ChannelError.

    free: called with the pointer when the last tensor in the memory is gone.
    """
    raw = _Raw(pointer, num_bytes)
    weakref.finalize(raw, free, pointer).atexit = False  # the driver frees it then
    memory = torch.as_tensor(raw, device="cuda")
    if memory.data_ptr() != pointer:
        raise ChannelError(f"torch copied device memory at {pointer:#x} instead of using it")
    return memory


class DeviceMemory(SegmentMemory):
    """Device memory; `free(pointer)` runs when the last tensor in it is gone."""

    def __init__(self, fd: int, pointer: int, num_bytes: int, free: Callable[[int], None]) -> None:
        """Wrap memory under its `torch.cuda.device`. Raises ChannelError."""
        super().__init__(device_bytes(pointer, num_bytes, free), mmap.mmap(fd, FLAG_BYTES))


class PeerDeviceMemory(SegmentMemory):
    """Memory of another GPU of this node, which torch may not know: only copies read it."""

    def __init__(self, fd: int, pointer: int, num_bytes: int, free: Callable[[int], None]) -> None:
        super().__init__(torch.empty(0, dtype=torch.uint8), mmap.mmap(fd, FLAG_BYTES))
        self.pointer, self.num_bytes = pointer, num_bytes
        weakref.finalize(self, free, pointer).atexit = False


class _Copy(NamedTuple):
    """A packet that is complete at `done` (None: already). memory: kept open until then."""

    packet: Packet
    done: torch.cuda.Event | None = None
    memory: PeerDeviceMemory | None = None
    set_flag: Callable[[], None] = lambda: None

    @property
    def is_done(self) -> bool:
        return self.done is None or has_passed(self.done)


class IpcLink(SharedMemoryLink):
    def __init__(
        self,
        link_sockets: LinkSockets,
        config: ChannelConfig,
        clock: Clock,
        device: torch.device,
        streams: TransferStreams,
    ) -> None:
        super().__init__(link_sockets, config, clock)
        self._device = device
        self._runtime: Any = require_cupy("ipc").cuda.runtime
        self._ready: ReadyQueue[tuple[Reservation, Header]] = ReadyQueue(device)
        self._buffers = DeviceBuffers(config.segment_bytes, device, streams.memory)  # of copies
        self._copying = tuple(streams.share(priority) for priority in Priority)
        self._copies: tuple[deque[_Copy], ...] = tuple(deque() for _ in Priority)

    @property
    def needs_polling(self) -> bool:
        return not self._ready.is_empty or any(self._copies)

    @property
    def has_progress(self) -> bool:
        return self._ready.has_ready or any(copies and copies[0].is_done for copies in self._copies)

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        self._buffers.releases.settle()
        return super().reserve(parts)

    def commit(self, reservation: Reservation, header: Header) -> None:
        self._ready.add(header.priority, (reservation, header))
        reservation.tensors = ()
        self._announce()

    def receive(self) -> list[Packet]:
        """Return the packets that have arrived completely, in order within each class."""
        self._buffers.releases.settle()
        packets = super().receive()
        self._announce()
        for copies in self._copies:
            while copies and copies[0].is_done:
                if self._is_peer_ending():
                    raise connection_closed(self.peer)
                copied = copies.popleft()
                copied.set_flag()
                copied.packet.arrived_s = self._clock()
                packets.append(copied.packet)
        return packets

    def maintain(self, now_s: float) -> None:
        """Free idle copies. Segments stay: freeing memory that the peer has open is undefined."""
        self._buffers.releases.settle()
        self._buffers.segments.idle(now_s)

    def close(self) -> None:
        super().close()
        self._ready.clear()
        self._buffers.segments.close()

    def _is_peer_ending(self) -> bool:
        """Return whether the driver may have freed the memory that is copied from."""
        process = self.monitor.local_process
        return process is not None and process.is_ending

    def _announce(self) -> None:
        """Send the frames of the payloads that are filled."""
        for priority in Priority:
            for reservation, header in self._ready.take(priority):
                super().commit(reservation, msgspec.structs.replace(header, sent_s=self._clock()))

    def _take(self, message: Payload) -> Packet | None:
        copies, layout = self._copies[message.header.priority], lay_out(message.parts)
        memory = self._peer_segments.memory(message.place, layout.num_bytes)
        if isinstance(memory, PeerDeviceMemory):
            copies.append(self._copy(message, memory, layout))
        elif copies:
            copies.append(_Copy(self._packet(message)))  # behind the copies of its class
        else:
            return self._packet(message)
        return None

    def _copy(self, message: Payload, memory: PeerDeviceMemory, layout: PayloadLayout) -> _Copy:
        header, stream = message.header, self._copying[message.header.priority]
        buffer = self._buffers.allocate(message.parts, layout)
        self._runtime.memcpyAsync(
            buffer.span.data_ptr(),
            memory.pointer + message.place.offset_bytes,
            layout.num_bytes,
            self._runtime.memcpyDefault,
            stream.cuda_stream,
        )
        self.received_bytes += layout.num_bytes
        release = partial(self._buffers.release, buffer)
        packet = Packet(self.peer, header, buffer.tensors, self._clock(), release)
        return _Copy(packet, recorded(stream), memory, releaser(memory, message.place.slot))

    def _releaser(self, memory: SegmentMemory, slot: int) -> Callable[[], None]:
        return partial(self._buffers.releases.add, releaser(memory, slot))

    def _new_memory(self, number: int, num_bytes: int) -> SegmentMemory:
        fd = create_memfd(0)
        try:
            with torch.cuda.device(self._device):
                pointer = self._runtime.malloc(num_bytes)
                memory = DeviceMemory(fd, pointer, num_bytes, self._runtime.free)
                handle = self._runtime.ipcGetMemHandle(pointer)
            device = device_identity(self._device)
            self._frames.send(encode(Announce(number, num_bytes, handle, device)), fd)
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
            is_ours = message.device == device_identity(self._device)
            kind = DeviceMemory if is_ours else PeerDeviceMemory
            with torch.cuda.device(self._device):
                pointer = self._runtime.ipcOpenMemHandle(message.handle)
                return kind(fd, pointer, message.num_bytes, self._runtime.ipcCloseMemHandle)
        except RuntimeError as error:
            raise PeerError(
                f"cannot open GPU memory of {self.peer} (channel.backend=nccl needs no access "
                f"between processes): {error}",
                self.peer,
            ) from None
        finally:
            os.close(fd)


class IpcEndpoint(DeviceEndpoint):
    """Payloads lie in memory of the GPUs of one node."""

    backend = "ipc"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_unix()

    def _join(self, link_sockets: LinkSockets) -> Link:
        return IpcLink(link_sockets, self.config, self.clock, self.device, self.streams)
