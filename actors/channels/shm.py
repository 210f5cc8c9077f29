"""Shared memory between CPU processes of one node (Linux: memfd, abstract Unix sockets).

Payloads lie in segments, which both processes map:

    sender                                             receiver
    SegmentAllocator: segments with an allocator each  PeerSegments: the same segments, by number
      allocate(num_bytes) -> location ── frame ──────> views at the offset
      reclaim()      <── flags[slot] = 1, a store in shared memory ── release()

Every allocation has a slot: one byte in the segment's flag page. The receiver sets it, in any
order, from any thread; the sender looks for set bytes before it allocates. When a segment is full,
another one is added. Segments other than the first are freed when idle.

The flag is an ordinary store. x86 keeps earlier loads before it; on weaker memory models the
thousands of instructions of an interpreter step between a tensor's last use and the flag do.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.link import (
    ALIGNMENT_BYTES,
    CallArea,
    FrameLink,
    Link,
    LinkSockets,
    Reservation,
    Views,
    encode,
    lay_out,
)
from actors.channels.listener import listen_unix
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.machine import available_bytes

FLAG_BYTES: Final = 4096  # one byte per slot
IDLE_S: Final = 5.0
_SET: Final = b"\x01"


class PayloadLocation(msgspec.Struct, frozen=True, array_like=True):
    """Place of a payload in a peer's segments."""

    segment: int
    slot: int
    offset_bytes: int


class SegmentMemory:
    """Memory of one segment on either side, freed with the last tensor in it.

    flags: host memory of FLAG_BYTES.
    """

    def __init__(self, memory: torch.Tensor, flags: mmap.mmap | bytearray) -> None:
        self.num_bytes, self.views, self.flags = memory.numel(), Views(memory), flags


def map_memfd(fd: int, num_bytes: int) -> SegmentMemory:
    """Map a memfd, which the caller keeps: the flag page, then `num_bytes` of payload.

    Populating it at once avoids later page faults.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    pages = mmap.mmap(fd, FLAG_BYTES + num_bytes, flags=flags)
    payload = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=FLAG_BYTES)
    return SegmentMemory(payload, pages)


def create_memfd(
    num_bytes: int, *, advice: str = "lower channel.segment_bytes or the batch size"
) -> int:
    """Create a sealed, allocated memfd of FLAG_BYTES + num_bytes. Raises ChannelError.

    It has no name, so nothing remains however both processes end. It is sealed against shrinking: a
    mapped page that vanishes would kill the other process (SIGBUS).
    """
    total = FLAG_BYTES + num_bytes
    try:  # both need a descriptor
        available = available_bytes()
        if total > available:  # the kernel would overcommit and kill a process later
            raise ChannelError(
                f"a segment of {total} bytes exceeds the {available} bytes of free memory: {advice}"
            )
        fd = os.memfd_create("tandem-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ChannelError(f"no segment of {total} bytes: {error.strerror}") from None
    try:
        os.posix_fallocate(fd, 0, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise ChannelError(f"no memory for a segment of {total} bytes: {error.strerror}") from None
    return fd


def check_memfd(fd: int, num_bytes: int) -> bool:
    """Return whether a received fd is sealed and has the announced size."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return False
    return bool(sealed) and os.fstat(fd).st_size == FLAG_BYTES + num_bytes


class _Segment:
    """A segment on its sender's side."""

    def __init__(self, number: int, memory: SegmentMemory, num_bytes: int) -> None:
        self.number = number
        self.memory = memory
        self.idle_since_s: float | None = None
        self.allocator = FirstFit(num_bytes)
        self._slots: list[int] = []  # free again
        self._offsets: dict[int, int] = {}  # slot -> offset
        self._end = 0  # no slot at or above it was ever used

    def allocate(self, num_bytes: int) -> PayloadLocation | None:
        if len(self._offsets) == FLAG_BYTES:
            return None
        offset = self.allocator.allocate(num_bytes)
        if offset is None:
            return None
        if not self._slots:
            self._slots.append(self._end)
            self._end += 1
        slot = self._slots.pop()
        self._offsets[slot] = offset
        return PayloadLocation(self.number, slot, offset)

    def free(self, slot: int) -> None:
        self.allocator.free(self._offsets.pop(slot))
        self._slots.append(slot)

    def reclaim(self) -> None:
        """Free the slots that the receiver has released."""
        flags = self.memory.flags
        while (slot := flags.find(_SET, 0, self._end)) >= 0:
            flags[slot] = 0
            self.free(slot)


class SegmentAllocator:
    """All segments in which one side of a link sends.

    new_memory: makes a segment's memory from its number and bytes, and announces it to the peer
    before any packet uses it.
    """

    def __init__(self, segment_bytes: int, new_memory: Callable[[int, int], SegmentMemory]) -> None:
        self._segment_bytes = segment_bytes
        self._new_memory = new_memory
        self._segments: dict[int, _Segment] = {}
        self._next = 0

    def allocate(self, num_bytes: int) -> PayloadLocation:
        """Return space for a payload of num_bytes > 0. Raises ChannelError if there is none."""
        for segment in self._segments.values():
            segment.reclaim()
            place = segment.allocate(num_bytes)
            if place is not None:
                return place
        place = self._add(num_bytes).allocate(num_bytes)
        assert place is not None
        return place

    def memory(self, number: int) -> SegmentMemory:
        return self._segments[number].memory

    def idle(self, now_s: float) -> list[int]:
        """Free and return the segments that were empty for IDLE_S; never the first."""
        dropped = []
        for segment in list(self._segments.values())[1:]:
            segment.reclaim()
            if segment.allocator.used:
                segment.idle_since_s = None
            elif segment.idle_since_s is None:
                segment.idle_since_s = now_s
            elif now_s - segment.idle_since_s >= IDLE_S:
                dropped.append(segment.number)
                del self._segments[segment.number]
        return dropped

    def close(self) -> None:
        self._segments.clear()

    def _add(self, at_least_bytes: int) -> _Segment:
        size = -(-self._segment_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # of any dtype
        while size < at_least_bytes:
            size *= 2
        number, self._next = self._next, self._next + 1
        memory = self._new_memory(number, size)
        segment = self._segments[number] = _Segment(number, memory, size)
        return segment


class PeerSegments(dict[int, SegmentMemory]):
    """The segments in which the other side of a link sends, by number."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer

    def memory(self, place: PayloadLocation, num_bytes: int) -> SegmentMemory:
        """Return the memory of a location. Raises PeerError for an invalid one."""
        memory = self.get(place.segment)
        if (
            memory is None
            or not 0 <= place.slot < FLAG_BYTES
            or not 0 <= place.offset_bytes <= memory.num_bytes - num_bytes
        ):
            raise PeerError(f"{self._peer} sent a packet outside its segments: {place}", self._peer)
        return memory


def releaser(memory: SegmentMemory, slot: int) -> partial[None]:
    """Return a thread-safe function that marks a slot as released."""
    return partial(memory.flags.__setitem__, slot, 1)


class FirstFit:
    """First-fit allocator of offsets in [0, size). Callers round sizes to the alignment."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._gaps = [(0, size)]  # [start, end), ascending; they never touch each other
        self._sizes: dict[int, int] = {}  # offset -> size, of what is allocated

    def allocate(self, size: int) -> int | None:
        """Return the lowest offset with `size` > 0 free bytes, or None."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._sizes[start] = size
                self.used += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Free an allocated offset. Raises KeyError."""
        size = self._sizes.pop(offset)
        self.used -= size
        start, end = offset, offset + size
        index = bisect_right(self._gaps, (offset, 0))  # the first gap above
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            index -= 1
            start = self._gaps.pop(index)[0]
        self._gaps.insert(index, (start, end))


class ShmEndpoint(Endpoint):
    """Payloads lie in shared memory. `listen` ignores its host: the address is a Unix socket's."""

    backend = "shm"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_unix()

    def _join(self, link_sockets: LinkSockets) -> Link:
        return SharedMemoryLink(link_sockets, self.config, self.clock)


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=0):
    segment: int
    num_bytes: int
    handle: bytes = b""  # of device memory
    device: str = ""  # identity of its GPU


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=1):
    header: Header
    parts: tuple[TensorSpec, ...]
    place: PayloadLocation


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=2):
    segment: int


class AnnounceArea(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A call area: its memory and its event come with this frame."""

    num_bytes: int


_Message = Announce | Payload | Withdraw | AnnounceArea
_decode = msgspec.msgpack.Decoder(_Message).decode


class SharedMemoryLink(FrameLink):
    """Link over host shared memory. `ipc.IpcLink` replaces the methods at the end."""

    def __init__(self, link_sockets: LinkSockets, config: ChannelConfig, clock: Clock) -> None:
        super().__init__(link_sockets, clock, _decode)
        self._segments = SegmentAllocator(config.segment_bytes, self._new_memory)
        self._peer_segments = PeerSegments(link_sockets.peer)

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        parts = tuple(parts)
        layout = lay_out(parts)
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
            self._frames.send(encode(AnnounceArea(num_bytes)), fd, event)
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
        place, layout = message.place, lay_out(message.parts)
        memory = self._peer_segments.memory(place, layout.num_bytes)
        tensors = memory.views.cut(message.parts, layout, place.offset_bytes)
        self.received_bytes += layout.num_bytes
        release = self._releaser(memory, place.slot)
        return Packet(self.peer, message.header, tensors, self._clock(), release)

    def _map_area(self, message: AnnounceArea) -> None:
        if self.opened_area is not None:
            raise PeerError(f"{self.peer} opened a call area twice", self.peer)
        memory = self._map_memfd(message.num_bytes).views.memory
        self.opened_area = CallArea(self.peer, memory, self._frames.take_fd())

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
