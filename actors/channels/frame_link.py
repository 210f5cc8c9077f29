"""A link whose data socket carries small frames; the payload takes another path."""

from __future__ import annotations

import abc
import array
import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from actors.channels.base import Packet, connection_closed, connection_lost
from actors.channels.link import Link, LinkSockets
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.frames import FRAME_ERRORS


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
        self._unsent: deque[tuple[bytes, int]] = deque()  # bytes and their fd, or -1
        self._tail = b""  # a partial frame
        self._fds: deque[int] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    def send(self, body: bytes, fd: int = -1) -> None:
        """Send a frame, and a duplicate of `fd` with it. Raises PeerDeadError."""
        data = _LENGTH.pack(len(body)) + body
        with self._lock:
            if self._unsent:
                self._unsent.append((data, os.dup(fd) if fd >= 0 else -1))
                return
            sent = self._write(data, fd)
            if sent < len(data):
                later = os.dup(fd) if fd >= 0 and sent == 0 else -1
                self._unsent.append((data[sent:], later))
                self.blocked_since_s = self._clock()

    def flush(self) -> None:
        """Send buffered frames as far as the kernel accepts them. Raises PeerDeadError."""
        with self._lock:
            while self._unsent:
                data, fd = self._unsent[0]
                sent = self._write(data, fd)
                if sent:
                    self.blocked_since_s = self._clock()
                    if fd >= 0:
                        os.close(fd)
                    self._unsent[0] = (data[sent:], -1)
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
            for _, fd in self._unsent:
                if fd >= 0:
                    os.close(fd)
            self._unsent.clear()
        while self._fds:
            os.close(self._fds.popleft())

    def _write(self, data: bytes, fd: int) -> int:
        """Return how many bytes the kernel accepted (0: it would have blocked)."""
        try:
            if fd < 0:
                return self.sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
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
