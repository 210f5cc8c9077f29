"""Links between ranks: common parts, and those whose data socket carries only small frames."""

from __future__ import annotations

import abc
import array
import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec, connection_closed, connection_lost
from actors.channels.heartbeat import HeartbeatMonitor
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.messages import FRAME_ERRORS

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


class CallArea:
    """Memory of direct calls (kernels/direct_calls.py) to or from a peer, and the event of a call.

    memory: uint8 [num_bytes], mapped as long as it is held.
    """

    def __init__(self, peer: str, memory: torch.Tensor, event: int) -> None:
        self.peer, self.memory, self.event = peer, memory, event

    def close(self) -> None:
        os.close(self.event)


class Link(abc.ABC):
    """One end of a link, used by the endpoint's owner unless a method says otherwise.

    poll_fd: the descriptor that the owner polls; None: the link's threads report instead. epoch:
    the peer's. opened_area: a call area that the peer has opened, until the owner takes it.
    """

    poll_fd: int | None = None
    opened_area: CallArea | None = None

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
    def needs_polling(self) -> bool:
        """True while transfers are under way that `poll_fd` does not report."""
        return False

    @property
    def has_progress(self) -> bool:
        """True if `receive` would advance such a transfer now."""
        return False

    def start(self) -> None:  # noqa: B027 - most links have no threads
        """Start the link's threads once the owner knows the link."""

    @abc.abstractmethod
    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation: ...

    @abc.abstractmethod
    def commit(self, reservation: Reservation, header: Header) -> None: ...

    def open_call_area(self, num_bytes: int) -> CallArea | None:
        """Share memory for direct calls with the peer; None: the backend has none."""
        return None

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
    """Place the parts one after the other at multiples of 64 bytes.

    A payload without bytes has a place as well.
    """
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return PayloadLayout(tuple(offsets), max(end, ALIGNMENT_BYTES))


@dataclass(slots=True, eq=False)
class Reservation:
    """Channel memory to fill in place and commit once; `tensors` is empty afterwards.

    memory: what the backend keeps about it.
    """

    peer: str
    parts: tuple[TensorSpec, ...]
    layout: PayloadLayout
    tensors: Sequence[torch.Tensor]
    memory: Any = None


class PayloadFrame(msgspec.Struct, frozen=True, array_like=True):
    """Header frame of a payload that follows on another path or on the same socket."""

    header: Header
    parts: tuple[TensorSpec, ...]


decode_payload = msgspec.msgpack.Decoder(PayloadFrame).decode
encode = msgspec.msgpack.Encoder().encode


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


class FrameLink(Link, abc.ABC):
    """Link that receives frames and turns them into packets."""

    def __init__(
        self, link_sockets: LinkSockets, clock: Clock, decode: Callable[[bytes], Any]
    ) -> None:
        super().__init__(link_sockets, clock)
        self._frames = FrameSocket(link_sockets.data, link_sockets.peer, clock)
        self._decode = decode
        self.poll_fd = link_sockets.data.fileno()

    @property
    def blocked_since_s(self) -> float | None:
        return self._frames.blocked_since_s

    @property
    def pending(self) -> bool:
        return self._frames.pending

    def flush(self) -> None:
        with contextlib.suppress(PeerDeadError):  # `receive` finds the end of the stream
            self._frames.flush()

    def receive(self) -> list[Packet]:
        packets = []
        for frame in self._frames.receive():
            try:
                packet = self._handle(self._decode(frame))
            except PeerError:
                raise
            except (ChannelError, *FRAME_ERRORS) as error:
                raise PeerError(f"{self.peer} sent a bad frame: {error}", self.peer) from None
            except Exception as error:
                raise PeerError(
                    f"cannot receive from {self.peer}: {type(error).__name__}: {error}", self.peer
                ) from error
            if packet is not None:
                packets.append(packet)
        return packets

    def close(self) -> None:
        self._frames.close()

    @abc.abstractmethod
    def _handle(self, message: Any) -> Packet | None:
        """Process a frame; return a packet if it announces one."""


MAX_FRAME_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_MAX_FDS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


class FrameSocket:
    """One socket to `peer`. `send` and `flush` are thread-safe; one thread calls `receive`."""

    def __init__(self, sock: socket.socket, peer: str, clock: Clock) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self.blocked_since_s: float | None = None
        self._clock = clock
        self._takes_fds = sock.family == socket.AF_UNIX
        self._lock = threading.Lock()
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()  # bytes, their fds
        self._tail = b""  # a partial frame
        self._fds: deque[int] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    def send(self, body: bytes, *fds: int) -> None:
        """Send a frame, and duplicates of `fds` with it. Raises PeerDeadError."""
        data = _LENGTH.pack(len(body)) + body
        with self._lock:
            if self._unsent:
                self._unsent.append((data, tuple(map(os.dup, fds))))
                return
            sent = self._write(data, fds)
            if sent < len(data):
                self._unsent.append((data[sent:], () if sent else tuple(map(os.dup, fds))))
                self.blocked_since_s = self._clock()

    def flush(self) -> None:
        """Send buffered frames as far as the kernel accepts them. Raises PeerDeadError."""
        with self._lock:
            while self._unsent:
                data, fds = self._unsent[0]
                sent = self._write(data, fds)
                if sent:
                    self.blocked_since_s = self._clock()
                    self._unsent[0] = (data[sent:], ())
                    _close_all(fds)
                if sent < len(data):
                    return
                self._unsent.popleft()
            self.blocked_since_s = None

    def receive(self) -> list[bytes]:
        """Return the frame bodies of one read, maybe none. Raises PeerDeadError at the end."""
        try:
            piece = self._read()
        except BlockingIOError:
            return []
        except OSError as error:
            raise connection_lost(self.peer, error) from None
        if not piece:
            raise connection_closed(self.peer)
        frames: list[bytes] = []
        self._tail = self._cut(self._tail + piece if self._tail else piece, frames)
        return frames

    def take_fd(self) -> int:
        """Return the next file descriptor that came with a frame. Raises PeerError."""
        if not self._fds:
            raise PeerError(f"{self.peer} sent a frame without its file descriptor", self.peer)
        return self._fds.popleft()

    def close(self) -> None:
        with self._lock:
            self.sock.close()
            for _, fds in self._unsent:
                _close_all(fds)
            self._unsent.clear()
        _close_all(self._fds)
        self._fds.clear()

    def _write(self, data: bytes, fds: tuple[int, ...]) -> int:
        """Return how many bytes the kernel accepted (0: it would have blocked)."""
        try:
            if not fds:
                return self.sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            return self.sock.sendmsg([data], [rights])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    def _read(self) -> bytes:
        if not self._takes_fds:
            return self.sock.recv(_CHUNK_BYTES)
        data, ancillary, _, _ = self.sock.recvmsg(
            _CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        return data

    def _cut(self, data: bytes, frames: list[bytes]) -> bytes:
        """Append the complete frames in `data` to `frames`; return the rest."""
        start = 0
        while len(data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_FRAME_BYTES:
                raise PeerError(f"{self.peer} sent a frame of {size} bytes", self.peer)
            end = start + _LENGTH.size + size
            if end > len(data):
                break
            frames.append(data[start + _LENGTH.size : end])
            start = end
        return data[start:] if start else data


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
