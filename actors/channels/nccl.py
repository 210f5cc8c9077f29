"""NCCL between GPUs, through cupy.

    sender leads                                  receiver
    once filled: send on the lane's stream
    header ── TCP ──────────────────────────────> memory, receive on the lane's stream
                                ── NCCL ────────> delivered when all of it has arrived

    sender                                        receiver leads
    once filled: header ── TCP ─────────────────> memory, receive on the lane's stream
    send on the lane's stream   <── TCP ── posted
                                ── NCCL ────────> delivered when all of it has arrived

Each (pair, direction, class) is a lane: a two-rank communicator. No pair blocks another, and LS
overtakes a BE packet under way. Nothing is launched before the payload is complete, so a transfer
waits on the device for the other end's host, never for compute.

Of the two ends of a link, the one with the smaller name leads: it launches first, and the other end
only once it has. A rank's host may therefore wait for its device at any time (a module load,
cudaFree): its own transfers that wait for a peer wait for a rank with a larger name only, so no
cycle of waiting ranks exists. A transfer takes a stream that no other lane uses, since streams in
one hardware queue wait for each other (`TransferStreams`).

`abort` ends a transfer whose peer died; it yields no packet, because the header alone would count
as an answer to a half-sent payload. Creating a communicator and its first transfer block until the
peer does the same. Both happen while the link is joined, in the same order on both sides; later
calls never wait for the peer. A replacement rank gets new communicators; those between other ranks
stay.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec
from actors.channels.cuda import (
    DeviceBuffer,
    DeviceBuffers,
    DeviceEndpoint,
    ReadyQueue,
    TransferStreams,
    empty_bytes,
    has_passed,
    new_stream,
    recorded,
    require_nccl,
)
from actors.channels.link import (
    FrameLink,
    Link,
    LinkSockets,
    Reservation,
    encode,
    lay_out,
)
from actors.channels.listener import listen_tcp
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.messages import FRAME_ERRORS
from contracts.requests import Priority

UniqueId = bytes | tuple[int, ...]  # of 128: bytes in cupy 14, a tuple of chars before


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """Unique ids of the communicators by class, in the format of this cupy version."""

    from_initiator: tuple[UniqueId, UniqueId]
    to_initiator: tuple[UniqueId, UniqueId]


class _Announced(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A payload that is complete on the sender's device."""

    header: Header
    parts: tuple[TensorSpec, ...]


class _Posted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The receive of the oldest announced payload of the class is launched."""

    priority: Priority


_decode_offer = msgspec.msgpack.Decoder(_Offer).decode
_decode = msgspec.msgpack.Decoder(_Announced | _Posted).decode


@dataclass(slots=True, eq=False)
class _Transfer:
    """A payload in a lane. done: set at its launch."""

    header: Header
    parts: tuple[TensorSpec, ...]
    buffer: DeviceBuffer
    done: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.done is not None and has_passed(self.done)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffer.tensors)


class _Lane:
    """One direction of one class. `waiting` transfers are launched in order."""

    def __init__(
        self, nccl: Any, id_: UniqueId, rank: int, streams: TransferStreams, priority: Priority
    ) -> None:
        """Connect as `rank`, 0 or 1. Blocks until the peer does the same."""
        self.communicator = nccl.NcclCommunicator(2, id_, rank)
        self.waiting: deque[_Transfer] = deque()
        self.under_way: deque[_Transfer] = deque()
        self._type, self._peer = nccl.NCCL_UINT8, 1 - rank
        self._streams, self._priority = streams, priority
        self._stream: torch.cuda.Stream | None = None

    def launch(self, call: _Call) -> _Transfer | None:
        """Launch the next transfer by `send` or `recv`; None if none waits or no stream is free."""
        if not self.waiting:
            return None
        transfer = self.waiting[0]
        if self._stream is None:
            self._stream = self._streams.acquire(self._priority)
        elif not self.has_stream:
            return None  # another lane waits for the stream
        if self._stream is None:
            return None
        self.enqueue(call, transfer.buffer.span, self._stream)
        transfer.done = recorded(self._stream)
        self.under_way.append(self.waiting.popleft())
        return transfer

    def enqueue(self, call: _Call, span: torch.Tensor, stream: torch.cuda.Stream) -> None:
        call(span.data_ptr(), span.nbytes, self._type, self._peer, stream.cuda_stream)

    def finished(self) -> Iterator[_Transfer]:
        """Remove and yield the transfers that are complete."""
        while self.under_way and self.under_way[0].is_done:
            yield self.under_way.popleft()
        if self._stream is not None and not self.under_way:
            self._streams.release(self._priority, self._stream)
            self._stream = None

    @property
    def has_finished(self) -> bool:
        return bool(self.under_way) and self.under_way[0].is_done

    @property
    def has_stream(self) -> bool:
        """True if `launch` would find a stream for a waiting transfer."""
        if self._stream is None:
            return self._streams.has_free(self._priority)
        return not (self._streams.short[self._priority] and self.under_way)

    def abort(self) -> None:
        self.communicator.abort()
        self.waiting.clear()
        self.under_way.clear()
        list(self.finished())  # gives the stream back


_Call = Callable[[int, int, int, int, int], None]  # pointer, count, dtype, peer's rank, stream


class Lanes:
    """Lanes of one link, by class, in both directions."""

    def __init__(
        self,
        nccl: Any,
        offer: _Offer,
        streams: TransferStreams,
        *,
        initiator: bool,
        device: torch.device,
    ) -> None:
        """Connect all lanes. Blocks until the peer does the same: see `open_lanes`."""
        rank = 0 if initiator else 1
        probe = empty_bytes(1, device)
        stream = torch.cuda.current_stream(device)
        outgoing: list[_Lane] = []
        incoming: list[_Lane] = []
        for priority in Priority:  # in the same order on both sides
            for ids, is_outgoing in (
                (offer.from_initiator, initiator),
                (offer.to_initiator, not initiator),
            ):
                lane = _Lane(nccl, ids[priority], rank, streams, priority)
                (outgoing if is_outgoing else incoming).append(lane)
                call = lane.communicator.send if is_outgoing else lane.communicator.recv
                lane.enqueue(call, probe, stream)  # the first transfer connects
                recorded(stream).synchronize()  # type: ignore[no-untyped-call]
        self.outgoing, self.incoming = tuple(outgoing), tuple(incoming)

    def check(self) -> None:
        """Raise NcclError if a transfer failed on the device."""
        for lane in (*self.outgoing, *self.incoming):
            lane.communicator.check_async_error()

    def abort(self) -> None:
        for lane in (*self.outgoing, *self.incoming):
            lane.abort()


_Opened = TypeVar("_Opened")


def open_lanes(make: Callable[[], _Opened], peer: str, deadline_s: float) -> _Opened:
    """Return what `make` returns, from a daemon thread. Raises PeerHungError after deadline_s."""
    results: list[_Opened | RuntimeError] = []

    def run() -> None:
        try:
            results.append(make())
        except RuntimeError as error:  # NcclError is one, and so are CUDA's errors
            results.append(error)

    thread = threading.Thread(target=run, name=f"nccl-{peer}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not results:
        raise PeerHungError(f"{peer}: no NCCL communicator within {deadline_s:g} s", peer)
    if isinstance(results[0], RuntimeError):
        raise ChannelError(f"{peer}: no NCCL communicator: {results[0]}")
    return results[0]


class NcclLink(FrameLink):
    """Link whose payloads travel over NCCL, in memory of the device."""

    def __init__(
        self,
        link_sockets: LinkSockets,
        config: ChannelConfig,
        clock: Clock,
        lanes: Lanes,
        streams: TransferStreams,
        device: torch.device,
        *,
        leads: bool,
    ) -> None:
        """leads: this end launches its half of each transfer first."""
        super().__init__(link_sockets, clock, _decode)
        self._lanes = lanes
        self._leads = leads
        self._buffers = DeviceBuffers(config.segment_bytes, device, streams.memory)
        self._ready: ReadyQueue[_Transfer] = ReadyQueue(device)
        self._posted = [0] * len(Priority)  # receives that the peer has launched ahead of our send
        self._all_lanes = [
            (priority, lane)
            for way in (lanes.outgoing, lanes.incoming)
            for priority, lane in zip(Priority, way, strict=True)
        ]

    @property
    def needs_polling(self) -> bool:
        return not self._ready.is_empty or any(
            lane.under_way or (lane.waiting and self._may_launch(priority, lane))
            for priority, lane in self._all_lanes
        )

    @property
    def has_progress(self) -> bool:
        return self._ready.has_ready or any(
            lane.has_finished
            or (lane.waiting and lane.has_stream and self._may_launch(priority, lane))
            for priority, lane in self._all_lanes
        )

    def receive(self) -> list[Packet]:
        """Return the packets that have arrived completely, in order within each class."""
        packets = super().receive()
        with self._failures():
            for priority in Priority:
                self._advance_outgoing(priority)
                packets += self._advance_incoming(priority)
        return packets

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        parts, layout = tuple(parts), lay_out(parts)
        buffer = self._buffers.allocate(parts, layout)
        return Reservation(self.peer, parts, layout, buffer.tensors, buffer)

    def commit(self, reservation: Reservation, header: Header) -> None:
        reservation.tensors = ()
        transfer = _Transfer(header, reservation.parts, reservation.memory)
        self._ready.add(header.priority, transfer)
        self.sent_bytes += transfer.num_bytes
        with self._failures():
            self._advance_outgoing(header.priority)

    def maintain(self, now_s: float) -> None:
        self._buffers.releases.settle()
        self._buffers.segments.idle(now_s)
        with self._failures():
            self._lanes.check()

    def close(self) -> None:
        super().close()
        self._lanes.abort()
        self._ready.clear()
        self._buffers.segments.close()

    def _handle(self, message: _Announced | _Posted) -> None:
        if isinstance(message, _Posted):
            self._posted[message.priority] += 1
            if self._posted[message.priority] > len(self._lanes.outgoing[message.priority].waiting):
                raise PeerError(f"{self.peer} posted a receive of no payload", self.peer)
            return
        parts = message.parts
        buffer = self._buffers.allocate(parts, lay_out(parts))
        transfer = _Transfer(message.header, parts, buffer)
        self._lanes.incoming[message.header.priority].waiting.append(transfer)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise errors of NCCL and of CUDA as PeerError."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL failed: {error}", self.peer) from None

    def _may_launch(self, priority: Priority, lane: _Lane) -> bool:
        is_outgoing = lane is self._lanes.outgoing[priority]
        return self._leads or not is_outgoing or self._posted[priority] > 0

    def _advance_outgoing(self, priority: Priority) -> None:
        lane = self._lanes.outgoing[priority]
        for sent in lane.finished():
            sent.buffer.free()
        for transfer in self._ready.take(priority):
            lane.waiting.append(transfer)
            if not self._leads:
                self._announce(transfer)
        while self._may_launch(priority, lane):
            launched = lane.launch(lane.communicator.send)
            if launched is None:
                return
            if self._leads:
                self._announce(launched)
            else:
                self._posted[priority] -= 1

    def _announce(self, transfer: _Transfer) -> None:
        header = msgspec.structs.replace(transfer.header, sent_s=self._clock())
        self._frames.send(encode(_Announced(header, transfer.parts)))

    def _advance_incoming(self, priority: Priority) -> Iterator[Packet]:
        lane = self._lanes.incoming[priority]
        while lane.launch(lane.communicator.recv) is not None:
            if self._leads:
                self._frames.send(encode(_Posted(priority)))
        for transfer in lane.finished():
            self.received_bytes += transfer.num_bytes
            buffer = transfer.buffer
            release = partial(self._buffers.release, buffer)
            yield Packet(self.peer, transfer.header, buffer.tensors, self._clock(), release)


class NcclEndpoint(DeviceEndpoint):
    """Payloads lie in this rank's GPU memory. All calls use the owner's current stream."""

    backend = "nccl"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_tcp(host)

    def _offer(self) -> bytes:
        nccl = require_nccl()
        ids = [nccl.get_unique_id() for _ in range(4)]
        return msgspec.msgpack.encode(_Offer((ids[0], ids[1]), (ids[2], ids[3])))

    def _join(self, link_sockets: LinkSockets) -> Link:
        nccl = require_nccl()
        try:
            offer = _decode_offer(link_sockets.offer)
        except FRAME_ERRORS as error:
            raise ChannelError(f"{link_sockets.peer} sent no NCCL ids: {error}") from None
        lanes = open_lanes(
            lambda: self._lanes(nccl, offer, link_sockets),
            link_sockets.peer,
            self.config.connect_timeout_s,
        )
        return NcclLink(
            link_sockets,
            self.config,
            self.clock,
            lanes,
            self.streams,
            self.device,
            leads=self.name < link_sockets.peer,
        )

    def _lanes(self, nccl: Any, offer: _Offer, link_sockets: LinkSockets) -> Lanes:
        # Device and stream are the thread's.
        with torch.cuda.device(self.device), torch.cuda.stream(new_stream(self.device)):
            return Lanes(
                nccl, offer, self.streams, initiator=link_sockets.initiator, device=self.device
            )
