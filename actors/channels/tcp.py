"""TCP between CPU nodes.

    wire = 4-byte little-endian length | msgpack (header, parts) | payload, each part at 64 bytes

Each link has a sender thread and a receiver thread, so that transfers go on while the owner
computes. Small packets that find the line free are sent by `commit` itself: a thread's wake-up
costs more than they do. The kernel copies straight from and to the tensors' memory.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import torch

from actors.channels.base import Header, Packet, Part, Reservation
from actors.channels.buffers import Buffer, BufferPool
from actors.channels.endpoint import BaseEndpoint
from actors.channels.header_link import MAX_FRAME_BYTES
from actors.channels.link import Joint, Layout, Link, lay_out
from actors.channels.listener import listen_tcp
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.frames import BAD_FRAME
from contracts.logs import event

DIRECT_BYTES: Final = 64 << 10  # payloads up to this size are tried at once, by the owner
CHUNK_BYTES: Final = 256 << 10  # progress is noted at least this often
_JOIN_S: Final = 5.0
_LENGTH = struct.Struct("<I")

log = logging.getLogger(f"tandem.{__name__}")

Report = Callable[[Packet | PeerError], None]


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    header: Header
    parts: tuple[Part, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class Buffered:
    """A reservation in a buffer of the pool."""

    __slots__ = ("buffer", "layout", "parts", "peer", "tensors")

    def __init__(self, peer: str, parts: tuple[Part, ...], layout: Layout, buffer: Buffer) -> None:
        self.peer = peer
        self.parts = parts
        self.layout = layout
        self.buffer = buffer
        self.tensors: Sequence[torch.Tensor] = buffer.views.cut(parts, layout, 0)


class _Message(msgspec.Struct, frozen=True):
    """What is left to send of a packet."""

    pieces: list[memoryview]
    buffer: Buffer


class TcpLink(Link):
    """`report` is called on the receiver's thread with every packet, and once with the loss."""

    def __init__(self, joint: Joint, clock: Clock, report: Report) -> None:
        super().__init__(joint, clock)
        self._sock = joint.data
        self._sock.settimeout(None)
        self._report = report
        self._pool = BufferPool()
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._queued = 0  # counted by the owner
        self._sent = 0  # counted by the sender thread: equal means the line is free
        self._progress_s = clock()
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"{role}-{joint.peer}", daemon=True)
            for role, run in (("send", self._send_all), ("receive", self._receive_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def blocked_since_s(self) -> float | None:
        return None if self._queued == self._sent else self._progress_s

    def reserve(self, parts: Sequence[Part]) -> Buffered:
        parts = tuple(parts)
        layout = lay_out(parts)
        return Buffered(self.peer, parts, layout, self._pool.take(layout.num_bytes))

    def commit(self, reservation: Reservation, header: Header) -> None:
        assert isinstance(reservation, Buffered)
        body = _encode(_Frame(header, reservation.parts))
        num_bytes = reservation.layout.num_bytes
        head = memoryview(_LENGTH.pack(len(body)) + body)
        pieces = [head, reservation.buffer.data[:num_bytes]] if num_bytes else [head]
        self.sent_bytes += num_bytes
        reservation.tensors = ()
        if num_bytes <= DIRECT_BYTES and self._queued == self._sent:
            pieces = self._send_some(pieces, socket.MSG_DONTWAIT)
            if not pieces:
                self._pool.give(reservation.buffer)
                return
        if self._queued == self._sent:
            self._progress_s = self._clock()
        self._queued += 1
        self._queue.put(_Message(pieces, reservation.buffer))

    def receive(self) -> list[Packet]:
        return []

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)  # ends both threads' calls
        self._queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_S)
        self._sock.close()

    def _failed(self, what: str, error: Exception) -> PeerError:
        reason = f"cannot {what} {self.peer}: {type(error).__name__}: {error}"
        event(log, "link_failed", logging.ERROR, error, reason=reason)
        return PeerError(reason, self.peer)

    # --- sending: the owner and the sender thread, never both at once

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            pieces = message.pieces
            try:
                while pieces and not self._closed:
                    pieces = self._send_some(pieces, 0)
                    self._progress_s = self._clock()
            except PeerDeadError:
                pass  # the receiver finds the end of the stream, after the last packet
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the peer's loss
                self._report(self._failed("send to", error))
                return
            self._pool.give(message.buffer)
            self._sent += 1

    def _send_some(self, pieces: list[memoryview], flags: int) -> list[memoryview]:
        """Sends at most about CHUNK_BYTES; returns what is left. Raises PeerDeadError."""
        head, rest = pieces[0], pieces[1:]
        now = [head[:CHUNK_BYTES]] + ([rest[0][:CHUNK_BYTES]] if rest else [])
        try:
            sent = self._sock.sendmsg(now, (), flags)
        except BlockingIOError:
            return pieces
        except OSError as error:
            raise PeerDeadError(f"{self.peer}: connection lost ({error})", self.peer) from None
        if sent < len(head):
            return [head[sent:], *rest]
        sent -= len(head)
        return [rest[0][sent:]] if rest and sent < len(rest[0]) else []

    # --- receiving: the receiver thread

    def _receive_all(self) -> None:
        prefix = memoryview(bytearray(_LENGTH.size))
        body = memoryview(bytearray(MAX_FRAME_BYTES))
        try:
            while True:
                self._fill(prefix)
                (size,) = _LENGTH.unpack(prefix)
                if size > MAX_FRAME_BYTES:
                    raise PeerError(f"{self.peer} sent a header of {size} bytes", self.peer)
                self._fill(body[:size])
                self._report(self._packet(_decode(body[:size])))
        except PeerError as error:
            self._report(error)
        except (ChannelError, *BAD_FRAME) as error:
            self._report(PeerError(f"{self.peer} sent a bad header: {error}", self.peer))
        except Exception as error:  # noqa: BLE001 - nobody would hear of the peer again
            self._report(self._failed("receive from", error))

    def _packet(self, frame: _Frame) -> Packet:
        layout = lay_out(frame.parts)
        buffer = self._pool.take(layout.num_bytes)
        self._fill(buffer.data[: layout.num_bytes])
        self.received_bytes += layout.num_bytes
        tensors = buffer.views.cut(frame.parts, layout, 0)
        release = partial(self._pool.give, buffer)
        return Packet(self.peer, frame.header, tensors, self._clock(), release)

    def _fill(self, target: memoryview) -> None:
        """Receives len(target) bytes. Raises PeerDeadError."""
        start, end = 0, len(target)
        while start < end:
            stop = min(start + CHUNK_BYTES, end)
            try:
                count = self._sock.recv_into(target[start:stop], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise PeerDeadError(f"{self.peer}: connection lost ({error})", self.peer) from None
            if not count:
                raise PeerDeadError(f"{self.peer} closed its connection", self.peer)
            start += count
            self.heart.heard(self._clock())


class TcpEndpoint(BaseEndpoint):
    """Payload lies in ordinary CPU memory on both sides."""

    backend = "tcp"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_tcp(host)

    def _join(self, joint: Joint) -> Link:
        link: TcpLink

        def report(news: Packet | PeerError) -> None:
            if isinstance(news, Packet):
                self._tell(news)
            else:
                self._tell_loss(link, news)

        link = TcpLink(joint, self.clock, report)
        return link
