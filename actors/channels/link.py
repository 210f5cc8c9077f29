"""Common parts of all links, whatever moves their payload."""

from __future__ import annotations

import abc
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from actors.channels.base import Header, Packet, Reservation, TensorSpec
from actors.channels.heartbeat import HeartbeatMonitor
from contracts.clock import Clock

ALIGNMENT_BYTES = 64


class LinkSockets(msgspec.Struct, frozen=True, kw_only=True):
    """The two sockets of a new link and what its ends exchanged in the handshake."""

    peer: str
    data: socket.socket
    heartbeat: socket.socket
    initiator: bool
    offer: bytes
    clock_offset_s: float = 0.0  # peer's clock minus ours; 0 on one machine
    epoch: int = 0  # the peer's

    def close(self) -> None:
        self.data.close()
        self.heartbeat.close()


class Link(abc.ABC):
    """One end of a link, used by the endpoint's owner unless a method says otherwise.

    poll_fd: the descriptor that the owner polls; None: the link's threads report instead. epoch:
    the peer's.
    """

    poll_fd: int | None = None

    def __init__(self, link_sockets: LinkSockets, clock: Clock) -> None:
        self.peer, self.epoch = link_sockets.peer, link_sockets.epoch
        self.monitor = HeartbeatMonitor(link_sockets.heartbeat, link_sockets.peer, clock())
        self.clock_offset_s = link_sockets.clock_offset_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self._clock = clock

    @property
    @abc.abstractmethod
    def blocked_since_s(self) -> float | None:
        """Time of a blocked send's last progress, or None. Thread-safe."""

    @property
    def pending(self) -> bool:
        """True if `flush` should run when the socket accepts bytes again."""
        return False

    @property
    def has_incoming(self) -> bool:
        """True while packets are under way that `poll_fd` does not report."""
        return False

    @property
    def has_arrived(self) -> bool:
        """True if `receive` would return such a packet now."""
        return False

    def start(self) -> None:  # noqa: B027 - most links have no threads
        """Start the link's threads once the owner knows the link."""

    @abc.abstractmethod
    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation: ...

    @abc.abstractmethod
    def commit(self, reservation: Reservation, header: Header) -> None: ...

    @abc.abstractmethod
    def receive(self) -> list[Packet]:
        """Return packets that arrived on `poll_fd`. Raises PeerError at its end."""

    def flush(self) -> None:  # noqa: B027 - most links have nothing to flush
        """Send buffered data. Thread-safe; never raises, never waits."""

    def maintain(self, now_s: float) -> None:  # noqa: B027 - most links need none
        """Do housekeeping, about once a second. Raises PeerError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close sockets and end threads. Packets already delivered stay readable."""


class PayloadLayout(msgspec.Struct, frozen=True):
    """Aligned byte offsets of a payload's parts."""

    offsets_bytes: tuple[int, ...]
    num_bytes: int


def lay_out(parts: Sequence[TensorSpec]) -> PayloadLayout:
    """Place the parts one after the other at multiples of 64 bytes."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return PayloadLayout(tuple(offsets), end)


class LinkReservation:
    """The `Reservation` of every backend; `memory` is what the backend keeps about it."""

    __slots__ = ("layout", "memory", "parts", "peer", "tensors")

    def __init__(
        self,
        peer: str,
        parts: tuple[TensorSpec, ...],
        layout: PayloadLayout,
        tensors: Sequence[torch.Tensor],
        memory: Any = None,
    ) -> None:
        self.peer = peer
        self.parts = parts
        self.layout = layout
        self.tensors = tensors
        self.memory = memory


class PayloadFrame(msgspec.Struct, frozen=True, array_like=True):
    """Header frame of a payload that follows on another path or on the same socket."""

    header: Header
    parts: tuple[TensorSpec, ...]


# Built at import: msgspec crashes when two threads build the first decoder of a type at once.
decode_payload = msgspec.msgpack.Decoder(PayloadFrame).decode
encode = msgspec.msgpack.Encoder().encode


def empty_tensors(
    parts: Sequence[TensorSpec], device: torch.device | None = None
) -> list[torch.Tensor]:
    return [torch.empty(part.shape, dtype=part.torch_dtype, device=device) for part in parts]


class Views:
    """Tensors that are views of one block of memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: uint8 [num_bytes], aligned to 64 bytes."""
        self.memory = memory
        self._as_dtype = {torch.uint8: memory}

    def cut(
        self, parts: Sequence[TensorSpec], layout: PayloadLayout, start_bytes: int
    ) -> list[torch.Tensor]:
        return [
            self._view(part, start_bytes + offset)
            for part, offset in zip(parts, layout.offsets_bytes, strict=True)
        ]

    def _view(self, part: TensorSpec, offset_bytes: int) -> torch.Tensor:
        dtype = part.torch_dtype
        typed = self._as_dtype.get(dtype)
        if typed is None:
            typed = self._as_dtype[dtype] = self.memory.view(dtype)
        shape = part.shape
        if len(shape) == 2:
            strides: tuple[int, ...] = (shape[1], 1)
        else:
            strides = contiguous_strides(shape)
        return torch.as_strided(typed, shape, strides, offset_bytes // dtype.itemsize)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
