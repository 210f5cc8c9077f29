"""Shared memory between CPU processes of one node (Linux: memfd, abstract Unix sockets)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.link import (
    CallArea,
    FrameLink,
    Link,
    LinkSockets,
    Reservation,
    empty_tensors,
    encode,
    lay_out,
)
from actors.channels.listener import listen_unix
from actors.channels.segments import (
    PayloadLocation,
    PeerSegments,
    SegmentAllocator,
    SegmentMemory,
    check_memfd,
    create_memfd,
    map_memfd,
    releaser,
)
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import PeerDeadError, PeerError


class ShmEndpoint(Endpoint):
    """Payloads lie in shared memory. `listen` ignores its host: the address is a Unix socket's."""

    backend = "shm"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_unix()

    def _join(self, link_sockets: LinkSockets) -> Link:
        return SharedMemoryLink(link_sockets, self.config, self.clock, self.device)


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=0):
    segment: int
    num_bytes: int
    handle: bytes = b""  # of device memory
    device: str = ""  # identity of its GPU


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=1):
    header: Header
    parts: tuple[TensorSpec, ...]
    place: PayloadLocation | None  # None: the payload has no bytes


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=2):
    segment: int


class AnnounceArea(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A call area: its memory comes with this frame, its event with the next one of the kind."""

    num_bytes: int = 0


_Message = Announce | Payload | Withdraw | AnnounceArea
_decode = msgspec.msgpack.Decoder(_Message).decode


class SharedMemoryLink(FrameLink):
    """Link over host shared memory. `ipc.IpcLink` replaces the methods at the end."""

    def __init__(
        self, link_sockets: LinkSockets, config: ChannelConfig, clock: Clock, device: torch.device
    ) -> None:
        super().__init__(link_sockets, clock, _decode)
        self._device = device
        self._segments = SegmentAllocator(config.segment_bytes, self._new_memory)
        self._peer_segments = PeerSegments(link_sockets.peer)
        self._area_memory: SegmentMemory | None = None  # of a call area without its event

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        parts = tuple(parts)
        layout = lay_out(parts)
        if not layout.num_bytes:
            return Reservation(self.peer, parts, layout, empty_tensors(parts, self._device))
        place = self._segments.allocate(layout.num_bytes)
        views = self._segments.memory(place.segment).views
        tensors = views.cut(parts, layout, place.offset_bytes)
        return Reservation(self.peer, parts, layout, tensors, place)

    def commit(self, reservation: Reservation, header: Header) -> None:
        self._frames.send(encode(Payload(header, reservation.parts, reservation.memory)))
        self.sent_bytes += reservation.layout.num_bytes
        reservation.tensors = ()

    def open_call_area(self, num_bytes: int) -> CallArea:
        fd, event = create_memfd(num_bytes), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            area = CallArea(self.peer, map_memfd(fd, num_bytes).views.memory, event)
            self._frames.send(encode(AnnounceArea(num_bytes)), fd)
            self._frames.send(encode(AnnounceArea()), event)
        except BaseException:
            os.close(event)
            raise
        finally:
            os.close(fd)
        return area

    def maintain(self, now_s: float) -> None:
        with contextlib.suppress(PeerDeadError):  # `receive` finds the end of the stream
            for number in self._segments.idle(now_s):
                self._frames.send(encode(Withdraw(number)))

    def close(self) -> None:
        super().close()
        self._segments.close()
        self._peer_segments.clear()

    def _handle(self, message: _Message) -> Packet | None:
        if isinstance(message, Payload):
            return self._take(message)
        if isinstance(message, Announce):
            self._peer_segments[message.segment] = self._map(message)
        elif isinstance(message, AnnounceArea):
            self._map_area(message)
        else:
            self._peer_segments.pop(message.segment, None)
        return None

    def _packet(self, message: Payload) -> Packet:
        place, parts, now_s = message.place, message.parts, self._clock()
        layout = lay_out(parts)
        if place is None:
            return Packet(
                self.peer, message.header, empty_tensors(parts, self._device), now_s, None
            )
        memory = self._peer_segments.memory(place, layout.num_bytes)
        tensors = memory.views.cut(parts, layout, place.offset_bytes)
        self.received_bytes += layout.num_bytes
        release = self._releaser(memory, place.slot)
        return Packet(self.peer, message.header, tensors, now_s, release)

    def _map_area(self, message: AnnounceArea) -> None:
        if self.opened_area is not None:
            raise PeerError(f"{self.peer} opened a call area twice", self.peer)
        if self._area_memory is None:
            self._area_memory = self._map_memfd(message.num_bytes)
        else:
            memory, self._area_memory = self._area_memory, None
            self.opened_area = CallArea(self.peer, memory.views.memory, self._frames.take_fd())

    # --- replaced for device memory

    def _take(self, message: Payload) -> Packet | None:
        """Return the packet of a payload if it may be read now."""
        return self._packet(message)

    def _new_memory(self, number: int, num_bytes: int) -> SegmentMemory:
        """Create and announce a segment for sending."""
        fd = create_memfd(num_bytes)
        try:
            memory = map_memfd(fd, num_bytes)
            self._frames.send(encode(Announce(number, num_bytes)), fd)
        finally:
            os.close(fd)
        return memory

    def _map(self, message: Announce) -> SegmentMemory:
        """Map a segment that the peer announced. Raises PeerError."""
        return self._map_memfd(message.num_bytes)

    def _map_memfd(self, num_bytes: int) -> SegmentMemory:
        fd = self._frames.take_fd()
        try:
            if not check_memfd(fd, num_bytes):
                raise PeerError(f"{self.peer} sent an invalid segment", self.peer)
            return map_memfd(fd, num_bytes)
        except OSError as error:
            raise PeerError(f"cannot map a segment of {self.peer}: {error}", self.peer) from None
        finally:
            os.close(fd)

    def _releaser(self, memory: SegmentMemory, slot: int) -> Callable[[], None]:
        """Return the function that releases a payload."""
        return releaser(memory, slot)
