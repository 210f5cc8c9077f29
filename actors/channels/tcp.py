"""TCP between CPU nodes: one socket with a lane per class.

    packet = msgpack (header, parts) | payload, each part at 64 bytes
    wire   = pieces of packets: lane and size, size of the msgpack body or 0 | body | payload bytes

Packets are sent in pieces, each from the first lane with data: an LS packet waits for one piece of
a BE packet, not for its megabytes (2 MB take 16 ms at 1 Gbit/s). While both lanes wait, one piece
in BEST_EFFORT_INTERVAL is BE's, so LS cannot starve it. `SendBufferTuner` keeps the kernel's buffer
as small as the line allows.

Each link has a sender and a receiver thread, so that transfers continue while the owner computes.
`commit` itself sends small packets when the line is free: waking a thread costs more. The kernel
copies straight from and to the tensors' memory.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch

from actors.channels.base import Header, Packet, TensorSpec, connection_closed, connection_lost
from actors.channels.endpoint import Endpoint
from actors.channels.link import (
    MAX_FRAME_BYTES,
    Link,
    LinkSockets,
    PayloadFrame,
    Reservation,
    Views,
    decode_payload,
    encode,
    lay_out,
)
from actors.channels.listener import listen_tcp
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.logs import event
from contracts.messages import FRAME_ERRORS
from contracts.requests import Priority

_SMALLEST_BYTES = 4096
_KEPT_BYTES = 64 << 20  # idle buffers beyond this are freed


class Buffer:
    """A block of memory, as tensor views and as a buffer for socket calls."""

    __slots__ = ("data", "num_bytes", "views")

    def __init__(self, num_bytes: int) -> None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_bytes = num_bytes
        self.views = Views(memory)
        self.data = memoryview(cast(Any, memory.numpy()))


class BufferPool:
    """A pool of idle buffers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._idle_bytes = 0

    def acquire(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least `num_bytes`, rounded up to 2**n or 3/4 of it."""
        size = _SMALLEST_BYTES
        while size < num_bytes:
            size *= 2
        if size > _SMALLEST_BYTES and size // 4 * 3 >= num_bytes:
            size = size // 4 * 3
        with self._lock:
            free = self._free[size]
            if free:
                self._idle_bytes -= size
                return free.pop()
        return Buffer(size)

    def release(self, buffer: Buffer) -> None:
        with self._lock:
            if self._idle_bytes + buffer.num_bytes <= _KEPT_BYTES:
                self._idle_bytes += buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)


DIRECT_BYTES: Final = 64 << 10  # the owner sends payloads up to this size itself
BEST_EFFORT_INTERVAL: Final = 8
CHUNK_BYTES: Final = 256 << 10  # progress is recorded at least this often
_JOIN_S: Final = 5.0
PIECE = struct.Struct("<II")  # lane and bytes of the payload; bytes of the msgpack body
_LANE_SHIFT: Final = 31  # the lane is the highest bit of the size

log = logging.getLogger(f"tandem.{__name__}")

Report = Callable[[Packet | PeerError], None]


class _OutgoingPacket:
    """A packet to send. `partial_piece`: the rest of a piece that must go before any other."""

    __slots__ = ("_body", "_unsent", "buffer", "lane", "partial_piece")

    def __init__(self, header: Header, reservation: Reservation) -> None:
        self.lane = header.priority
        self.buffer: Buffer = reservation.memory
        self.partial_piece: list[memoryview] = []
        self._body = encode(PayloadFrame(header, reservation.parts))
        self._unsent = self.buffer.data[: reservation.layout.num_bytes]

    @property
    def is_sent(self) -> bool:
        return not (self._body or self._unsent or self.partial_piece)

    def next_piece(self, max_bytes: int) -> list[memoryview]:
        now, self._unsent = self._unsent[:max_bytes], self._unsent[max_bytes:]
        body, self._body = self._body, b""
        head = PIECE.pack(self.lane << _LANE_SHIFT | len(now), len(body)) + body
        return [memoryview(head), now]


class _IncomingPacket:
    """A packet whose first piece has arrived."""

    __slots__ = ("buffer", "frame", "layout", "received")

    def __init__(self, frame: PayloadFrame, pool: BufferPool) -> None:
        self.frame = frame
        self.layout = lay_out(frame.parts)
        self.buffer = pool.acquire(self.layout.num_bytes)
        self.received = 0

    @property
    def missing(self) -> int:
        return self.layout.num_bytes - self.received

    def next_view(self, num_bytes: int) -> memoryview:
        start, self.received = self.received, self.received + num_bytes
        return self.buffer.data[start : self.received]


class TcpLink(Link):
    """Link over TCP. `report` receives every packet, and the loss once, on the receiver thread."""

    def __init__(self, link_sockets: LinkSockets, clock: Clock, report: Report) -> None:
        super().__init__(link_sockets, clock)
        self._sock = link_sockets.data
        self._sock.settimeout(None)
        self._send_buffer = SendBufferTuner(self._sock)
        self._report = report
        self._pool = BufferPool()
        self._queue: queue.SimpleQueue[_OutgoingPacket | None] = queue.SimpleQueue()
        self._queued = 0  # counted by the owner
        self._sent = 0  # counted by the sender thread: equal means the line is free
        self._progress_s = clock()
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"{role}-{link_sockets.peer}", daemon=True)
            for role, run in (("send", self._send_all), ("receive", self._receive_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def blocked_since_s(self) -> float | None:
        return None if self._queued == self._sent else self._progress_s

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        parts = tuple(parts)
        layout = lay_out(parts)
        buffer = self._pool.acquire(layout.num_bytes)
        tensors = buffer.views.cut(parts, layout, 0)
        return Reservation(self.peer, parts, layout, tensors, buffer)

    def commit(self, reservation: Reservation, header: Header) -> None:
        packet = _OutgoingPacket(header, reservation)
        num_bytes = reservation.layout.num_bytes
        self.sent_bytes += num_bytes
        reservation.tensors = ()
        if num_bytes <= DIRECT_BYTES and self._queued == self._sent:
            packet.partial_piece = self._send_some(
                packet.next_piece(num_bytes), socket.MSG_DONTWAIT
            )
            if packet.is_sent:
                self._pool.release(packet.buffer)
                return
        if self._queued == self._sent:
            self._progress_s = self._clock()
        self._queued += 1
        self._queue.put(packet)

    def receive(self) -> list[Packet]:
        return []

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)  # ends both threads' calls
        self._queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_S)
        self._sock.close()

    def _loss_error(self, what: str, error: Exception) -> PeerError:
        reason = f"cannot {what} {self.peer}: {type(error).__name__}: {error}"
        event(log, "link_failed", logging.ERROR, error, reason=reason)
        return PeerError(reason, self.peer)

    # --- sending: the owner and the sender thread, never both at once

    def _send_all(self) -> None:
        lanes: tuple[deque[_OutgoingPacket], ...] = tuple(deque() for _ in Priority)
        ls_pieces = 0  # pieces of LS since BE had one, while BE waited
        try:
            while not self._closed:
                while not any(lanes) or not self._queue.empty():
                    packet = self._queue.get()
                    if packet is None:
                        return
                    self._send_whole(packet.partial_piece)
                    lanes[packet.lane].append(packet)
                lane = next(lane for lane in lanes if lane)  # LS first
                ls_pieces = ls_pieces + 1 if all(lanes) else 0
                if ls_pieces == BEST_EFFORT_INTERVAL:
                    ls_pieces, lane = 0, lanes[Priority.BE]
                if not lane[0].is_sent:
                    piece = lane[0].next_piece(self._send_buffer.piece_bytes)
                    self._send_buffer.record_sent(sum(map(len, piece)))
                    self._send_whole(piece)
                if lane[0].is_sent:
                    self._pool.release(lane.popleft().buffer)
                    self._sent += 1
        except PeerDeadError:
            self._sent = self._queued  # the receiver reports the end, after earlier packets
        except Exception as error:  # noqa: BLE001 - any failure ends this link only
            self._report(self._loss_error("send to", error))

    def _send_whole(self, piece: list[memoryview]) -> None:
        """Send all of `piece` and empty it. Raises PeerDeadError."""
        while piece:
            piece[:] = self._send_some(piece, 0)
            self._progress_s = self._clock()

    def _send_some(self, piece: list[memoryview], flags: int) -> list[memoryview]:
        """Send at most about CHUNK_BYTES; return the rest. Raises PeerDeadError."""
        try:
            sent = self._sock.sendmsg([part[:CHUNK_BYTES] for part in piece], (), flags)
        except BlockingIOError:
            return piece
        except OSError as error:
            raise connection_lost(self.peer, error) from None
        head, rest = piece[0], piece[1:]
        if sent < len(head):
            return [head[sent:], *rest]
        sent -= len(head)
        return [rest[0][sent:]] if rest and sent < len(rest[0]) else []

    # --- receiving: the receiver thread

    def _receive_all(self) -> None:
        head = memoryview(bytearray(PIECE.size))
        body = memoryview(bytearray(MAX_FRAME_BYTES))
        arriving: list[_IncomingPacket | None] = [None for _ in Priority]
        try:
            while True:
                self._fill(head)
                word, body_size = PIECE.unpack(head)
                lane, size = word >> _LANE_SHIFT, word & ~(1 << _LANE_SHIFT)
                if body_size:
                    arriving[lane] = self._start_packet(arriving[lane], body, body_size)
                packet = self._continue_packet(arriving[lane], size)
                self._fill(packet.next_view(size))
                if not packet.missing:
                    arriving[lane] = None
                    self._report(self._finish_packet(packet))
        except PeerError as error:
            self._report(error)
        except (ChannelError, *FRAME_ERRORS) as error:
            self._report(PeerError(f"{self.peer} sent a bad header: {error}", self.peer))
        except Exception as error:  # noqa: BLE001 - an unreported peer would never be lost
            self._report(self._loss_error("receive from", error))

    def _start_packet(
        self, before: _IncomingPacket | None, body: memoryview, size: int
    ) -> _IncomingPacket:
        """Return the packet that this piece begins. Raises PeerError or a decoding error."""
        if size > MAX_FRAME_BYTES:
            raise PeerError(f"{self.peer} sent a header of {size} bytes", self.peer)
        if before is not None:
            raise PeerError(
                f"{self.peer} started a packet before the last {before.missing} bytes of the "
                "previous one in its lane",
                self.peer,
            )
        self._fill(body[:size])
        return _IncomingPacket(decode_payload(body[:size]), self._pool)

    def _continue_packet(self, packet: _IncomingPacket | None, size: int) -> _IncomingPacket:
        """Return the packet that the next `size` payload bytes belong to. Raises PeerError."""
        if packet is None:
            raise PeerError(f"{self.peer} continued a packet that it never started", self.peer)
        if size > packet.missing:
            raise PeerError(
                f"{self.peer} sent {size} bytes of a packet with {packet.missing} left", self.peer
            )
        if not size:
            raise PeerError(f"{self.peer} continued a packet with no byte", self.peer)
        return packet

    def _finish_packet(self, packet: _IncomingPacket) -> Packet:
        self.received_bytes += packet.layout.num_bytes
        tensors = packet.buffer.views.cut(packet.frame.parts, packet.layout, 0)
        release = partial(self._pool.release, packet.buffer)
        return Packet(self.peer, packet.frame.header, tensors, self._clock(), release)

    def _fill(self, target: memoryview) -> None:
        """Receive len(target) bytes. Raises PeerDeadError."""
        start, end = 0, len(target)
        while start < end:
            stop = min(start + CHUNK_BYTES, end)
            try:
                count = self._sock.recv_into(target[start:stop], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise connection_lost(self.peer, error) from None
            if not count:
                raise connection_closed(self.peer)
            start += count
            self.monitor.record(self._clock())


class TcpEndpoint(Endpoint):
    """Payloads lie in ordinary CPU memory on both sides."""

    backend = "tcp"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_tcp(host)

    def _join(self, link_sockets: LinkSockets) -> Link:
        link: TcpLink

        def report(result: Packet | PeerError) -> None:
            if isinstance(result, Packet):
                self._post(result)
            else:
                self._post_loss(link, result)

        link = TcpLink(link_sockets, self.clock, report)
        return link


BUFFERED_S: Final = 0.001
MIN_PIECE_BYTES: Final = 64 << 10
INITIAL_PIECE_BYTES: Final = 256 << 10  # before the first measurement
TUNE_EVERY_BYTES: Final = 2 << 20  # sent between two measurements
_FIELDS: Final = struct.Struct("<148x I 8x Q")  # tcpi_min_rtt in us, tcpi_delivery_rate in bytes/s
_SO_BUF_LOCK: Final = 72  # Linux 5.14: 0 lets the kernel choose again


class SendBufferTuner:
    """Sizes one connection's send buffer. piece_bytes: what the line sends in BUFFERED_S."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._max_bytes = _max_bytes()
        self._sent_bytes = 0
        self.piece_bytes = INITIAL_PIECE_BYTES

    def record_sent(self, num_bytes: int) -> None:
        """Count bytes handed to the kernel while more were waiting."""
        self._sent_bytes += num_bytes
        if self._sent_bytes >= TUNE_EVERY_BYTES:
            self._sent_bytes = 0
            with contextlib.suppress(OSError):  # an old kernel, or a connection that has ended
                self._tune()

    def _tune(self) -> None:
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
        if len(info) < _FIELDS.size:
            return
        min_rtt_us, bytes_per_s = _FIELDS.unpack(info)
        self.piece_bytes = max(MIN_PIECE_BYTES, int(bytes_per_s * BUFFERED_S))
        num_bytes = max(MIN_PIECE_BYTES, int(bytes_per_s * (1e-6 * min_rtt_us + BUFFERED_S)))
        if num_bytes > self._max_bytes:  # more than SO_SNDBUF allows: the kernel chooses
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)  # doubled


def _max_bytes() -> int:
    """Return the kernel's limit for SO_SNDBUF."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except OSError:
        return MIN_PIECE_BYTES
