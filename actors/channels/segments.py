"""Payload memory that two processes share: segments, who uses which bytes, and how they are freed.

    sender                                             receiver
    Arena: segments, each with an allocator            Mappings: the same segments, by number
      place(num_bytes) -> Place(segment, slot, offset) ── frame ──> views at the offset
      reclaim()        <── flags[slot] = 1, a store in shared memory ── release()

Every allocation has a slot: one byte in the segment's flag page. The receiver sets it, in any
order, from any thread; the sender looks for set bytes before it allocates. A full segment is no
reason to wait: another one is added. Segments other than the first are given back when idle.

(The flag is an ordinary store. x86 keeps earlier loads before it; on weaker memory models the
thousands of instructions of an interpreter step between a tensor's last use and the flag do.)
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_right
from functools import partial
from typing import Final, Protocol

import msgspec
import torch

from actors.channels.link import ALIGNMENT_BYTES, Views
from contracts.errors import ChannelError, PeerError
from contracts.machine import available_bytes

FLAG_BYTES: Final = 4096  # one byte per slot
IDLE_S: Final = 5.0
_SET: Final = b"\x01"


class PayloadLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies."""

    segment: int
    slot: int
    offset_bytes: int


class SegmentMemory(Protocol):
    """One segment's memory, of either side. `flags` is host memory, FLAG_BYTES long."""

    views: Views
    flags: mmap.mmap

    def close(self) -> None:
        """Lets go of the memory. Tensors that are still held keep their bytes."""


class HostMemory:
    """Pages of a memfd: the flag page, then `num_bytes` of payload.

    A memfd has no name, so nothing is left behind however both processes end. It is sealed against
    shrinking: a mapped page that vanishes would kill the other process (SIGBUS).
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Maps `fd`; the caller keeps it. Mapping everything at once spares later page faults."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.flags = mmap.mmap(fd, FLAG_BYTES + num_bytes, flags=flags)
        payload = torch.frombuffer(
            self.flags, dtype=torch.uint8, count=num_bytes, offset=FLAG_BYTES
        )
        self.views = Views(payload)

    def close(self) -> None:
        """Nothing: the last tensor or release that refers to the pages unmaps them."""


def create_memfd(
    num_bytes: int, *, advice: str = "lower channel.segment_bytes or the batch size"
) -> int:
    """A sealed memfd of FLAG_BYTES + num_bytes, its pages allocated. Raises ChannelError, with
    `advice` where memory is short."""
    total = FLAG_BYTES + num_bytes
    try:  # each takes a descriptor
        available = available_bytes()
        if total > available:  # the kernel would hand out pages until it has to kill someone
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
    """Whether a received fd is sealed and as large as announced."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return False
    return bool(sealed) and os.fstat(fd).st_size == FLAG_BYTES + num_bytes


class _Segment:
    """A segment as its sender sees it."""

    def __init__(self, number: int, memory: SegmentMemory, num_bytes: int) -> None:
        self.number = number
        self.memory = memory
        self.idle_since_s: float | None = None
        self.allocator = FirstFit(num_bytes)
        self._slots = list(range(FLAG_BYTES - 1, -1, -1))  # free ones; the lowest is taken first
        self._offsets: dict[int, int] = {}  # slot -> offset
        self._end = 0  # no slot at or above has ever been taken

    def allocate(self, num_bytes: int) -> PayloadLocation | None:
        if not self._slots:
            return None
        offset = self.allocator.allocate(num_bytes)
        if offset is None:
            return None
        slot = self._slots.pop()
        self._end = max(self._end, slot + 1)
        self._offsets[slot] = offset
        return PayloadLocation(self.number, slot, offset)

    def free(self, slot: int) -> None:
        self.allocator.free(self._offsets.pop(slot))
        self._slots.append(slot)

    def reclaim(self) -> None:
        """Takes back what the receiver has released."""
        flags = self.memory.flags
        while (slot := flags.find(_SET, 0, self._end)) >= 0:
            flags[slot] = 0
            self.free(slot)


class MemoryFactory(Protocol):
    """Makes a segment's memory and tells the peer of it, before any packet in it is sent."""

    def __call__(self, number: int, num_bytes: int) -> SegmentMemory: ...


class SegmentAllocator:
    """All segments in which one side of a link sends."""

    def __init__(self, segment_bytes: int, new_memory: MemoryFactory) -> None:
        self._segment_bytes = segment_bytes
        self._new_memory = new_memory
        self._segments: dict[int, _Segment] = {}
        self._next = 0

    def allocate(self, num_bytes: int) -> PayloadLocation:
        """Space for a payload (num_bytes > 0). Raises ChannelError if the machine has none."""
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
        """Drops, and names, the segments that have been empty for IDLE_S; never the first."""
        dropped = []
        for segment in list(self._segments.values())[1:]:
            segment.reclaim()
            if segment.allocator.used:
                segment.idle_since_s = None
            elif segment.idle_since_s is None:
                segment.idle_since_s = now_s
            elif now_s - segment.idle_since_s >= IDLE_S:
                dropped.append(segment.number)
                self._segments.pop(segment.number).memory.close()
        return dropped

    def close(self) -> None:
        for segment in self._segments.values():
            segment.memory.close()
        self._segments.clear()

    def _add(self, at_least_bytes: int) -> _Segment:
        size = -(-self._segment_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # of any dtype
        while size < at_least_bytes:
            size *= 2
        number, self._next = self._next, self._next + 1
        memory = self._new_memory(number, size)
        segment = self._segments[number] = _Segment(number, memory, size)
        return segment


class PeerSegments:
    """The segments in which the other side of a link sends."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._memories: dict[int, SegmentMemory] = {}

    def add(self, number: int, memory: SegmentMemory) -> None:
        self._memories[number] = memory

    def drop(self, number: int) -> None:
        memory = self._memories.pop(number, None)
        if memory is not None:
            memory.close()

    def memory(self, place: PayloadLocation, num_bytes: int) -> SegmentMemory:
        """The memory behind `place`. Raises PeerError for a place that does not exist."""
        memory = self._memories.get(place.segment)
        if (
            memory is None
            or not 0 <= place.slot < FLAG_BYTES
            or not 0 <= place.offset_bytes <= memory.views.memory.numel() - num_bytes
        ):
            raise PeerError(f"{self._peer} sent a packet outside its segments: {place}", self._peer)
        return memory

    def close(self) -> None:
        for number in list(self._memories):
            self.drop(number)


def releaser(memory: SegmentMemory, slot: int) -> partial[None]:
    """What marks a slot as released; it may be called from any thread."""
    return partial(memory.flags.__setitem__, slot, 1)


class FirstFit:
    """Offsets in [0, size). Sizes are taken as they come: the caller rounds them to alignment."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._starts = [0]  # of the free gaps, ascending; gaps never touch each other
        self._ends = [size]
        self._sizes: dict[int, int] = {}  # offset -> size, of what is allocated

    def allocate(self, size: int) -> int | None:
        """The lowest offset with `size` (> 0) free bytes; None: no gap is large enough."""
        for index, start in enumerate(self._starts):
            end = self._ends[index]
            if end - start >= size:
                if end - start == size:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + size
                self._sizes[start] = size
                self.used += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Gives back what `allocate` returned. Raises KeyError if it is not allocated."""
        size = self._sizes.pop(offset)
        self.used -= size
        end = offset + size
        index = bisect_right(self._starts, offset)  # the first gap above
        joins_below = index > 0 and self._ends[index - 1] == offset
        joins_above = index < len(self._starts) and self._starts[index] == end
        if joins_below and joins_above:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_below:
            self._ends[index - 1] = end
        elif joins_above:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)
