"""A link whose payload stays where the sender wrote it: shared memory, or memory of one GPU.

Frames on the header socket, in order:
    Announce(segment, size, handle) + fd      before the first packet in that segment
    Payload(header, parts, place, ready)      one per packet
    Withdraw(segment)                         the segment was idle and is gone
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import msgspec
import torch

from actors.channels.base import Header, Packet, Part, Reservation
from actors.channels.frame_link import FrameLink, encode
from actors.channels.link import Joint, Layout, lay_out
from actors.channels.segments import (
    Arena,
    HostMemory,
    Mappings,
    Memory,
    Place,
    check_memfd,
    create_memfd,
    releaser,
)
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import PeerDeadError, PeerError


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=0):
    segment: int
    num_bytes: int
    handle: bytes = b""  # of device memory


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=1):
    header: Header
    parts: tuple[Part, ...]
    place: Place | None  # None: the payload has no bytes
    ready: bytes = b""  # handle of an interprocess event, when it is new


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=2):
    segment: int


_decode = msgspec.msgpack.Decoder(Announce | Payload | Withdraw).decode


class Placed:
    """A reservation in an arena."""

    __slots__ = ("layout", "parts", "peer", "place", "tensors")

    def __init__(
        self,
        peer: str,
        parts: tuple[Part, ...],
        layout: Layout,
        place: Place | None,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self.peer = peer
        self.parts = parts
        self.layout = layout
        self.place = place
        self.tensors = tensors


class RingLink(FrameLink):
    """Host shared memory. `ipc.IpcLink` replaces the methods at the end."""

    def __init__(self, joint: Joint, config: ChannelConfig, clock: Clock) -> None:
        super().__init__(joint, clock, _decode)
        self._arena = Arena(config.segment_bytes, self._new_memory)
        self._mappings = Mappings(joint.peer)

    def reserve(self, parts: Sequence[Part]) -> Placed:
        parts = tuple(parts)
        layout = lay_out(parts)
        if not layout.num_bytes:
            return Placed(self.peer, parts, layout, None, self._empty(parts))
        place = self._arena.place(layout.num_bytes)
        views = self._arena.memory(place.segment).views
        return Placed(self.peer, parts, layout, place, views.cut(parts, layout, place.offset_bytes))

    def commit(self, reservation: Reservation, header: Header) -> None:
        assert isinstance(reservation, Placed)
        place = reservation.place
        ready = self._mark_ready(place) if place is not None else b""
        self._header_link.send(encode(Payload(header, reservation.parts, place, ready)))
        self.sent_bytes += reservation.layout.num_bytes
        reservation.tensors = ()

    def tend(self, now_s: float) -> None:
        with contextlib.suppress(PeerDeadError):  # `receive` finds the end of the stream
            for number in self._arena.idle(now_s):
                self._header_link.send(encode(Withdraw(number)))

    def close(self) -> None:
        super().close()
        self._arena.close()
        self._mappings.close()

    def _take(self, message: Announce | Payload | Withdraw) -> Packet | None:
        if isinstance(message, Payload):
            return self._packet(message)
        if isinstance(message, Announce):
            self._mappings.add(message.segment, self._map(message))
        else:
            self._mappings.drop(message.segment)
        return None

    def _packet(self, message: Payload) -> Packet:
        place, parts, now_s = message.place, message.parts, self._clock()
        layout = lay_out(parts)
        if place is None:
            return Packet(self.peer, message.header, self._empty(parts), now_s, None)
        memory = self._mappings.memory(place, layout.num_bytes)
        release = self._wait_ready(place, message.ready, memory)
        tensors = memory.views.cut(parts, layout, place.offset_bytes)
        self.received_bytes += layout.num_bytes
        return Packet(self.peer, message.header, tensors, now_s, release)

    # --- what device memory does differently

    def _empty(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [torch.empty(part.shape, dtype=part.torch_dtype) for part in parts]

    def _new_memory(self, number: int, num_bytes: int) -> Memory:
        """Makes a segment for sending, and announces it."""
        fd = create_memfd(num_bytes)
        try:
            memory = HostMemory(fd, num_bytes)
            self._header_link.send(encode(Announce(number, num_bytes)), fd)
        finally:
            os.close(fd)
        return memory

    def _map(self, message: Announce) -> Memory:
        """Maps a segment that the peer announced. Raises PeerError."""
        fd = self._header_link.take_fd()
        try:
            if not check_memfd(fd, message.num_bytes):
                raise PeerError(f"{self.peer} sent a segment that is not one", self.peer)
            return HostMemory(fd, message.num_bytes)
        except OSError as error:
            raise PeerError(f"cannot map a segment of {self.peer}: {error}", self.peer) from None
        finally:
            os.close(fd)

    def _mark_ready(self, place: Place) -> bytes:
        """Called before a payload is announced: from when on may the peer read it?"""
        return b""

    def _wait_ready(self, place: Place, ready: bytes, memory: Memory) -> Callable[[], None]:
        """Called before a payload is read; returns what releases it."""
        return releaser(memory, place.slot)
