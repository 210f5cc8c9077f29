"""NCCL between GPUs, through cupy.

    sender                                        receiver
    header ── TCP ──────────────────────────────> poll: allocate the exact sizes
    send on the lane's stream, behind the         receive on the lane's stream; the packet is
    work that fills the tensors    ── NCCL ──>    delivered when all of it has arrived

Each (pair, direction, class) is a lane: a two-rank communicator and a stream. No pair blocks
another, and LS overtakes a BE packet under way. A receive is launched only when its send is under
way. `abort` ends one whose peer died; it yields no packet, because the header alone would count as
an answer to a half-sent payload.

Creating a communicator and its first transfer block until the peer does the same. Both happen while
the link is joined, on both sides at once; later calls never wait for the peer. A replacement rank
gets new communicators; those between other ranks stay.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from actors.channels.base import Header, Packet, TensorSpec
from actors.channels.cuda import require_nccl
from actors.channels.endpoint import Endpoint
from actors.channels.link import (
    FrameLink,
    Link,
    LinkSockets,
    PayloadFrame,
    Reservation,
    decode_payload,
    empty_tensors,
    encode,
    lay_out,
)
from actors.channels.listener import listen_tcp
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.messages import FRAME_ERRORS
from contracts.requests import Priority

UniqueId = bytes | tuple[int, ...]  # of 128: bytes in cupy 14, a tuple of chars before


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """Unique ids of the communicators by class, in the format of this cupy version."""

    from_initiator: tuple[UniqueId, UniqueId]
    to_initiator: tuple[UniqueId, UniqueId]


# Built at import: msgspec crashes when two threads build the first decoder of a type at once.
_decode_offer = msgspec.msgpack.Decoder(_Offer).decode
_Call = Callable[[int, int, int, int, int], None]  # pointer, count, dtype, peer's rank, stream


def transfer(
    nccl: Any, stream: torch.cuda.Stream, calls: Sequence[tuple[_Call, int, torch.Tensor]]
) -> torch.cuda.Event:
    """Enqueue (send or recv, peer's rank, tensor) as one group behind the current stream.

    The tensors must live until the returned event.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    nccl.groupStart()
    for call, rank, tensor in calls:
        if tensor.numel():
            call(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, rank, stream.cuda_stream)
    nccl.groupEnd()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class _Lane:
    """One direction of one class."""

    def __init__(self, nccl: Any, id_: UniqueId, rank: int, stream: torch.cuda.Stream) -> None:
        """Connect as `rank`, 0 or 1. Blocks until the peer does the same."""
        self.communicator = nccl.NcclCommunicator(2, id_, rank)
        self.stream = stream
        self._nccl = nccl
        self._peer = 1 - rank

    def send(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        calls = [(self.communicator.send, self._peer, tensor) for tensor in tensors]
        return transfer(self._nccl, self.stream, calls)

    def receive(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        calls = [(self.communicator.recv, self._peer, tensor) for tensor in tensors]
        return transfer(self._nccl, self.stream, calls)


class Lanes:
    """Lanes of one link, by class, in both directions."""

    def __init__(self, nccl: Any, offer: _Offer, *, initiator: bool, device: torch.device) -> None:
        """Connect all lanes. Blocks until the peer does the same: see `open_lanes`."""
        rank = 0 if initiator else 1
        probe = torch.zeros(1, dtype=torch.uint8, device=device)  # the first transfer connects
        outgoing: list[_Lane] = []
        incoming: list[_Lane] = []
        for priority in Priority:  # in the same order on both sides
            for ids, is_outgoing in (
                (offer.from_initiator, initiator),
                (offer.to_initiator, not initiator),
            ):
                first = -1 if priority is Priority.LS else 0
                stream = torch.cuda.Stream(device, priority=first)  # type: ignore[no-untyped-call]
                lane = _Lane(nccl, ids[priority], rank, stream)
                (outgoing if is_outgoing else incoming).append(lane)
                (lane.send if is_outgoing else lane.receive)([probe]).synchronize()
        self.outgoing, self.incoming = tuple(outgoing), tuple(incoming)

    def check(self) -> None:
        """Raise NcclError if a transfer failed on the device."""
        for lane in (*self.outgoing, *self.incoming):
            lane.communicator.check_async_error()

    def abort(self) -> None:
        for lane in (*self.outgoing, *self.incoming):
            lane.communicator.abort()


def open_lanes(make: Callable[[], Lanes], peer: str, deadline_s: float) -> Lanes:
    """Return what `make` returns, from a daemon thread. Raises PeerHungError after deadline_s."""
    results: list[Lanes | RuntimeError] = []

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
    """Link whose payloads travel over NCCL, in tensors on the device."""

    def __init__(
        self, link_sockets: LinkSockets, clock: Clock, lanes: Lanes, device: torch.device
    ) -> None:
        super().__init__(link_sockets, clock, decode_payload)
        self._lanes = lanes
        self._device = device
        self._sending: tuple[deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]], ...] = tuple(
            deque() for _ in Priority
        )
        self._receiving: tuple[deque[tuple[torch.cuda.Event, Packet]], ...] = tuple(
            deque() for _ in Priority
        )

    @property
    def has_incoming(self) -> bool:
        return any(self._receiving)

    @property
    def has_arrived(self) -> bool:
        return any(
            under_way and under_way[0][0].query()  # type: ignore[no-untyped-call]
            for under_way in self._receiving
        )

    def receive(self) -> list[Packet]:
        """Return the packets that have arrived completely, in order within each class."""
        packets = super().receive()
        for under_way in self._receiving:
            while under_way and under_way[0][0].query():  # type: ignore[no-untyped-call]
                packet = under_way.popleft()[1]
                packet.arrived_s = self._clock()
                packets.append(packet)
        return packets

    def reserve(self, parts: Sequence[TensorSpec]) -> Reservation:
        self._release_sent()
        parts = tuple(parts)
        tensors = empty_tensors(parts, self._device)
        return Reservation(self.peer, parts, lay_out(parts), tensors)

    def commit(self, reservation: Reservation, header: Header) -> None:
        self._frames.send(encode(PayloadFrame(header, reservation.parts)))
        tensors, reservation.tensors = reservation.tensors, ()
        try:
            sent = self._lanes.outgoing[header.priority].send(tensors)
            self._sending[header.priority].append((sent, tensors))
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL send failed: {error}", self.peer) from None
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)

    def maintain(self, now_s: float) -> None:
        self._release_sent()
        try:
            self._lanes.check()
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL failed: {error}", self.peer) from None

    def close(self) -> None:
        super().close()
        self._lanes.abort()
        for sending in self._sending:
            sending.clear()
        for receiving in self._receiving:
            receiving.clear()

    def _handle(self, message: PayloadFrame) -> None:
        tensors = empty_tensors(message.parts, self._device)
        lane = self._lanes.incoming[message.header.priority]
        try:
            done = lane.receive(tensors)
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL receive failed: {error}", self.peer) from None
        for tensor in tensors:
            tensor.record_stream(lane.stream)  # it may be freed before the transfer ends
        self.received_bytes += sum(tensor.nbytes for tensor in tensors)
        packet = Packet(self.peer, message.header, tensors, self._clock(), None)
        self._receiving[message.header.priority].append((done, packet))

    def _release_sent(self) -> None:
        for sending in self._sending:
            while sending and sending[0][0].query():  # type: ignore[no-untyped-call]
                sending.popleft()


class NcclEndpoint(Endpoint):
    """Payloads lie in this rank's GPU memory. All calls use the owner's current stream."""

    backend = "nccl"

    def _incoming_links(self) -> list[Link]:
        return [link for link in self._links.values() if link.has_incoming]

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
        return NcclLink(link_sockets, self.clock, lanes, self.device)

    def _lanes(self, nccl: Any, offer: _Offer, link_sockets: LinkSockets) -> Lanes:
        with torch.cuda.device(self.device):  # per thread, in CUDA's runtime
            return Lanes(nccl, offer, initiator=link_sockets.initiator, device=self.device)
