"""NCCL between GPUs, through cupy.

    sender                                        receiver
    header ── TCP ──────────────────────────────> poll: allocate the exact sizes
    send on the side stream, behind the           receive on the side stream; the consumer's
    work that fills the tensors    ── NCCL ──>    current stream waits for it, the host does not

Each (pair, direction) has its own two-rank communicator and its own stream, so that no pair blocks
another, and a receive is launched only when its send is under way. A receive that will never end
(the peer died) is ended by `abort`; what it would have filled must not be used: `PeerLost` tells.

Creating a communicator and its first transfer block until the peer does the same. Both happen while
the link is joined, on both sides at once: afterwards no call of ours waits for the peer.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from actors.channels.base import Header, Packet, Part, Reservation
from actors.channels.cuda import require_nccl
from actors.channels.endpoint import BaseEndpoint
from actors.channels.frame_link import FrameLink, encode
from actors.channels.link import Joint, Link
from actors.channels.listener import listen_tcp
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.frames import BAD_FRAME

UniqueId = bytes | tuple[int, ...]  # of 128: bytes in cupy 14, a tuple of chars before


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """Unique ids of the communicators, as this version of cupy gives and takes them."""

    from_initiator: UniqueId
    to_initiator: UniqueId


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    header: Header
    parts: tuple[Part, ...]


_decode = msgspec.msgpack.Decoder(_Frame).decode
_Call = Callable[[int, int, int, int, int], None]  # pointer, count, dtype, peer's rank, stream


def transfer(
    nccl: Any,
    stream: torch.cuda.Stream,
    calls: Sequence[tuple[_Call, int, torch.Tensor]],
) -> torch.cuda.Event:
    """Enqueues (send or recv, the peer's rank, tensor) as one group on `stream`, behind the current
    stream. The event is reached when all are done; the tensors must live until then."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    nccl.groupStart()
    for call, rank, tensor in calls:
        if tensor.numel():
            call(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, rank, stream.cuda_stream)
    nccl.groupEnd()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Lanes:
    """The two communicators of one link, and their streams."""

    def __init__(self, nccl: Any, offer: _Offer, *, initiator: bool, device: torch.device) -> None:
        """Blocks until the peer does the same: see `open_lanes`."""
        self._nccl = nccl
        self._rank = 0 if initiator else 1
        ids = (offer.from_initiator, offer.to_initiator)
        self._communicators = [nccl.NcclCommunicator(2, id_, self._rank) for id_ in ids]
        self._out, self._in = self._communicators[:: 1 if initiator else -1]
        self._out_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        nothing = torch.zeros(2, dtype=torch.uint8, device=device)  # the first transfer connects
        for communicator in self._communicators:
            outgoing = communicator is self._out
            done = (self.send if outgoing else self.receive)([nothing[int(outgoing)]])
            done.synchronize()

    def send(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        calls = [(self._out.send, 1 - self._rank, tensor) for tensor in tensors]
        return transfer(self._nccl, self._out_stream, calls)

    def receive(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        calls = [(self._in.recv, 1 - self._rank, tensor) for tensor in tensors]
        return transfer(self._nccl, self._in_stream, calls)

    def check(self) -> None:
        """Raises NcclError if a transfer failed on the device."""
        for communicator in self._communicators:
            communicator.check_async_error()

    def abort(self) -> None:
        for communicator in self._communicators:
            communicator.abort()


def open_lanes(make: Callable[[], Lanes], peer: str, deadline_s: float) -> Lanes:
    """What `make` returns. Raises PeerHungError after deadline_s: NCCL's own set-up cannot be cut
    short, so its thread is then left behind (a daemon: it does not keep the process alive)."""
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


class Sent:
    """A reservation: tensors on the device, sent from where they are."""

    __slots__ = ("parts", "peer", "tensors")

    def __init__(self, peer: str, parts: tuple[Part, ...], tensors: list[torch.Tensor]) -> None:
        self.peer = peer
        self.parts = parts
        self.tensors: Sequence[torch.Tensor] = tensors


class NcclLink(FrameLink):
    def __init__(self, joint: Joint, clock: Clock, lanes: Lanes, device: torch.device) -> None:
        super().__init__(joint, clock, _decode)
        self._lanes = lanes
        self._device = device
        self._sending: deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = deque()

    def reserve(self, parts: Sequence[Part]) -> Sent:
        self._let_go()
        parts = tuple(parts)
        return Sent(self.peer, parts, self._empty(parts))

    def commit(self, reservation: Reservation, header: Header) -> None:
        assert isinstance(reservation, Sent)
        self._header_link.send(encode(_Frame(header, reservation.parts)))
        tensors, reservation.tensors = reservation.tensors, ()
        try:
            self._sending.append((self._lanes.send(tensors), tensors))
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL send failed: {error}", self.peer) from None
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)

    def tend(self, now_s: float) -> None:
        self._let_go()
        try:
            self._lanes.check()
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL failed: {error}", self.peer) from None

    def close(self) -> None:
        super().close()
        self._lanes.abort()
        self._sending.clear()

    def _take(self, message: _Frame) -> Packet:
        tensors = self._empty(message.parts)
        try:
            done = self._lanes.receive(tensors)
        except RuntimeError as error:
            raise PeerError(f"{self.peer}: NCCL receive failed: {error}", self.peer) from None
        torch.cuda.current_stream(self._device).wait_event(done)
        self.received_bytes += sum(tensor.nbytes for tensor in tensors)
        return Packet(self.peer, message.header, tensors, self._clock(), None)

    def _empty(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [torch.empty(p.shape, dtype=p.torch_dtype, device=self._device) for p in parts]

    def _let_go(self) -> None:
        while self._sending and self._sending[0][0].query():  # type: ignore[no-untyped-call]
            self._sending.popleft()


class NcclEndpoint(BaseEndpoint):
    """Payload lies in memory of this rank's GPU. All calls on the owner's current stream."""

    backend = "nccl"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_tcp(host)

    def _offer(self) -> bytes:
        nccl = require_nccl()
        return msgspec.msgpack.encode(_Offer(nccl.get_unique_id(), nccl.get_unique_id()))

    def _join(self, joint: Joint) -> Link:
        try:
            nccl = require_nccl()
            offer = msgspec.msgpack.decode(joint.offer, type=_Offer)
            lanes = open_lanes(
                lambda: self._lanes(nccl, offer, joint), joint.peer, self.config.deadline_s
            )
        except (ChannelError, *BAD_FRAME) as error:
            joint.close()
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(f"{joint.peer} sent no NCCL ids: {error}") from None
        return NcclLink(joint, self.clock, lanes, self.device)

    def _lanes(self, nccl: Any, offer: _Offer, joint: Joint) -> Lanes:
        with torch.cuda.device(self.device):  # per thread, in CUDA's runtime
            return Lanes(nccl, offer, initiator=joint.initiator, device=self.device)
