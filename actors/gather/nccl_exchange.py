"""Parts of experts between nodes, by NCCL, for workers with their shards in GPU memory.

    the server leads                            the worker leads
    send on a stream   <── FETCH                                   <── FETCH
    DATA ──>           receive                  DATA ──>           receive
                       <── DONE                 send on a stream   <── POSTED
                                                                   <── DONE

Of the two ends, the one with the smaller name leads: it launches first, and the other end only once
it has. A transfer is launched when the layer is in its slot and the compute that read the buffer
has completed, so it waits on the device for the other end's host only (actors/channels/nccl.py).

A worker receives from one peer at a time, from the next rank on, on a stream of its own, behind the
compute that reads the other buffer. It sends to at most SENDS peers. So transfers occupy at most
(SENDS + 1) * NCCL_MAX_CTAS thread blocks.

Each connection has a communicator. Creating one blocks until the other end does, and a process
creates one at a time: the leading end locks its process, then the other end its own. Locks are
taken in the order of names, which is the same everywhere, so no cycle of waiting processes exists.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import torch

from actors.channels.cuda import (
    empty_bytes,
    has_passed,
    new_stream,
    recorded,
    require_nccl,
    wait_for_stream,
)
from actors.channels.nccl import UniqueId, open_lanes
from actors.gather.weight_link import Segment, receive_into, set_timeouts
from contracts.errors import PeerError, PeerHungError
from contracts.messages import FRAME_ERRORS

SENDS: Final = 4
_LENGTH: Final = struct.Struct("<I")
_ABORT_S: Final = 10.0
_MOST_BYTES: Final = 4096  # of an id

_decode: Callable[[bytes], UniqueId] = msgspec.msgpack.Decoder(UniqueId).decode


class NcclPart(Segment):
    """One end of a connection: of the server, or a worker's."""

    in_turn = True

    def __init__(
        self, nccl: Any, id_: UniqueId, peer: str, exchange: NcclExchange, *, serves: bool
    ) -> None:
        """Connect. Blocks until the peer does the same. Raises RuntimeError."""
        self.peer, self.end_bytes = peer, exchange.segment_bytes
        self.leads = exchange.leads(peer)
        self.posts = self.leads and not serves
        self._nccl, self._exchange, self._rank = nccl, exchange, 0 if serves else 1
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last transfer
        self._is_closed = False
        with torch.cuda.device(exchange.device), torch.cuda.stream(exchange.connecting):
            self._communicator = nccl.NcclCommunicator(2, id_, self._rank)
            self._launch([empty_bytes(1, exchange.device)], exchange.connecting)
            recorded(exchange.connecting).synchronize()  # type: ignore[no-untyped-call]

    @property
    def is_copied(self) -> bool:
        """True once the last transfer has completed. Raises PeerError if one failed."""
        try:
            self._communicator.check_async_error()
            return self._done is None or has_passed(self._done)
        except RuntimeError as error:
            raise self._failed(error) from None

    def copy(self, offset: int, into: Sequence[torch.Tensor]) -> None:
        """Receive a part. Raises PeerError."""
        self.transfer(into, self._exchange.receiving)

    def transfer(self, pieces: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Launch the transfer of a part. Raises PeerError."""
        try:
            with torch.cuda.device(self._exchange.device):
                self._launch([piece for piece in pieces if piece.numel()], stream)
            self._stream, self._done = stream, recorded(stream)
        except RuntimeError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """End what is under way, and wait until it has. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._communicator.abort()
            if self._stream is not None:
                wait_for_stream(self._stream, _ABORT_S, f"the end of a transfer with {self.peer}")

    def _launch(self, pieces: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        call = self._communicator.recv if self._rank else self._communicator.send
        self._nccl.groupStart()
        for piece in pieces:
            place = piece.data_ptr(), piece.nbytes, self._nccl.NCCL_UINT8, 1 - self._rank
            call(*place, stream.cuda_stream)
        self._nccl.groupEnd()

    def _failed(self, error: RuntimeError) -> PeerError:
        return PeerError(f"{self.peer}: NCCL failed: {error}", self.peer)


class NcclExchange:
    """Communicators and streams of one worker. Thread-safe."""

    def __init__(
        self, name: str, device: torch.device, segment_bytes: int, timeout_s: float
    ) -> None:
        """segment_bytes: of the largest part. timeout_s: to create a communicator."""
        self.device, self.segment_bytes = device, segment_bytes
        self.connecting, self.receiving = new_stream(device), new_stream(device)
        self._name, self._timeout_s = name, timeout_s
        self._creating = threading.Lock()
        self._changed = threading.Condition()  # guards the streams for sends
        self._free = [new_stream(device) for _ in range(SENDS)]

    def leads(self, peer: str) -> bool:
        return self._name < peer

    def connect(self, sock: socket.socket, peer: str, *, serves: bool) -> NcclPart:
        """Create a connection's communicator. Raises ChannelError, OSError."""
        set_timeouts(sock, self._timeout_s, socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        nccl, leads = require_nccl(), self.leads(peer)
        own = msgspec.msgpack.encode(nccl.get_unique_id()) if serves else b""
        other = b"" if leads else _receive(sock, peer)
        if not self._creating.acquire(timeout=self._timeout_s):
            raise PeerHungError(f"{peer}: no turn to connect in {self._timeout_s:g} s", peer)
        try:
            sock.sendall(_LENGTH.pack(len(own)) + own)
            other = _receive(sock, peer) if leads else other
            make = partial(
                NcclPart, nccl, _id_of(own if serves else other, peer), peer, self, serves=serves
            )
            return open_lanes(make, peer, self._timeout_s)
        finally:
            self._creating.release()

    def take_stream(self, timeout_s: float) -> torch.cuda.Stream | None:
        """Return a stream for one send; None at timeout_s. `return_stream` gives it back."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free), timeout_s)
            return self._free.pop() if self._free else None

    def return_stream(self, stream: torch.cuda.Stream) -> None:
        with self._changed:
            self._free.append(stream)
            self._changed.notify_all()


def _receive(sock: socket.socket, peer: str) -> bytes:
    head = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(head), peer)
    (size,) = _LENGTH.unpack(head)
    if size > _MOST_BYTES:
        raise PeerError(f"{peer} sends an NCCL id of {size} bytes: at most {_MOST_BYTES}", peer)
    data = bytearray(size)
    receive_into(sock, memoryview(data), peer)
    return bytes(data)


def _id_of(data: bytes, peer: str) -> UniqueId:
    try:
        return _decode(data)
    except FRAME_ERRORS as error:
        raise PeerError(f"{peer} sent no NCCL id: {error}", peer) from None
