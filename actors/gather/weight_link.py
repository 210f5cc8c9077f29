"""Protocol between a worker and a peer that gathers weights from it, and the gathering side.

After the handshake (purpose "weights", `Terms` on both sides; over shared memory the server's first
byte carries the segment's descriptor), on one connection per direction:

    peer    FETCH layer                       (POSTED)   DONE layer
    server              (KEEPALIVE ...)  DATA layer | bytes
                                                          over shared memory, and in memory
                                                          of a GPU: an offset, no bytes

POSTED: between GPUs of two nodes, the peer has launched its half (actors/gather/nccl_exchange.py).
One layer at a time. KEEPALIVE is a sign of life while a layer comes from the host store. The slot
may be overwritten after DONE, or once the connection is closed.

`WeightLink` is used by the copying thread and never waits: `advance` receives what has arrived.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from actors.channels import handshake, local_process
from actors.channels.base import connection_closed, connection_lost
from actors.channels.handshake import Identity
from actors.channels.listener import dial, shut_down
from actors.channels.shm import FLAG_BYTES, check_memfd
from actors.gather.device_segment import DeviceSegment, open_segment
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandshakeError, PeerError, PeerHungError
from contracts.messages import FRAME_ERRORS
from contracts.placement import placement_mismatch
from models.spec.model import ModelSpec

PURPOSE = "weights"
FETCH, DONE, POSTED = 1, 2, 3
KEEPALIVE, DATA, FAILED = 1, 2, 3
REQUEST = struct.Struct("<BI")  # kind, layer
REPLY = struct.Struct("<BIQ")  # kind, layer; bytes that follow, or the offset in the segment


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """Properties that both sides must agree on before weights move.

    epoch: the worker's incarnation; older ones of a name are refused. model_digest: of the model's
    shape and dtype. layout: of experts in memory (models/experts/expert_layout.py). placement:
    digest of the placement. segment_bytes: payload of the server's segment, over shared memory.
    handle: of that segment in the memory of a GPU; empty: it is the host's.
    """

    epoch: int
    model_digest: bytes
    layout: bytes
    placement: str = ""
    segment_bytes: int = 0
    handle: bytes = b""


_decode = msgspec.msgpack.Decoder(Terms).decode


def digest(model: ModelSpec, dtype: str) -> bytes:
    return hashlib.sha256(msgspec.json.encode((model, dtype))).digest()


def read_terms(extra: bytes, name: str) -> Terms:
    try:
        return _decode(extra)
    except FRAME_ERRORS:
        raise HandshakeError(f"{name} did not request weights") from None


def check_terms(remote: Terms, local: Terms, name: str, newest_epoch: int) -> None:
    """Raise HandshakeError unless the terms match."""
    if remote.model_digest != local.model_digest:
        raise HandshakeError(
            f"{name} holds experts of another model or dtype: start all prefill workers with the "
            "same configuration"
        )
    if remote.placement != local.placement:
        raise HandshakeError(placement_mismatch(name, remote.placement, local.placement))
    if remote.layout != local.layout:
        raise HandshakeError(
            f"{name} lays experts out in another way, for another processor: set "
            "prefill.packed_experts=false on all prefill workers"
        )
    if bool(remote.handle) != bool(local.handle):
        raise HandshakeError(
            f"one of {name} and this worker computes on a GPU, the other does not: set "
            "groups.device"
        )
    if remote.epoch < newest_epoch:
        raise HandshakeError(
            f"{name} is at epoch {remote.epoch}, which has been replaced by {newest_epoch}"
        )


_WAKE_BYTES = 2 << 20  # smallest wake-up except for the rest: each one costs compute time
_MOST_TEXT_BYTES = 4096
_MOST_PIECES = 512  # received at once; the kernel takes 1024


def join(
    peer: str,
    address: str,
    me: Identity,
    local: Terms,
    newest_epoch: int,
    deadline_s: float,
    connect: Callable[[socket.socket, str], Segment] | None = None,
) -> WeightLink:
    """Connect to a server. Raises HandshakeError if it refuses or mismatches, or ChannelError.

    connect: returns how parts come from the GPU of another node.
    """
    end_s = monotonic_s() + deadline_s
    sock = dial(address, deadline_s)
    try:
        left_s = max(end_s - monotonic_s(), 1e-3)
        extra = msgspec.msgpack.encode(local)
        remote = handshake.initiate(
            sock, me, purpose=PURPOSE, to=peer, extra=extra, deadline_s=left_s
        )
        terms = read_terms(remote.extra, peer)
        check_terms(terms, local, peer, newest_epoch)
        memory: Segment | None = None
        if terms.handle and connect is not None and sock.family != socket.AF_UNIX:
            memory = connect(sock, peer)
        elif terms.handle:
            memory = PeerGpuSegment(peer, terms)
        elif sock.family == socket.AF_UNIX:
            sock.settimeout(max(end_s - monotonic_s(), 1e-3))
            memory = HostSegment(_map(sock, peer, terms.segment_bytes))
        return WeightLink(peer, sock, terms.epoch, memory)
    except (ChannelError, OSError) as error:
        sock.close()
        if monotonic_s() >= end_s:
            raise PeerHungError(f"{peer} sent nothing for {deadline_s:g} s", peer) from None
        if isinstance(error, ChannelError):
            raise
        raise connection_lost(peer, error) from None


def _map(sock: socket.socket, peer: str, num_bytes: int) -> memoryview:
    """Map the peer's segment for reading. Raises PeerError."""
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if len(fds) != 1:
        raise connection_closed(peer)
    try:
        if not check_memfd(fds[0], num_bytes):
            raise PeerError(f"{peer} sent an invalid segment", peer)
        return memoryview(mmap.mmap(fds[0], FLAG_BYTES + num_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fds[0])


def bytes_of(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the writable memory of contiguous CPU tensors, without empty ones."""
    flat = (tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel())
    return [piece.numpy().data for piece in flat]


def set_timeouts(sock: socket.socket, seconds: float, *options: int) -> None:
    """Let the kernel wait for whole chunks: partial wake-ups would take the GIL from the loop."""
    sock.setblocking(True)
    whole, part = divmod(seconds, 1.0)
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(1e6 * part)))


def receive_into(sock: socket.socket, into: memoryview, peer: str) -> None:
    """Fill `into`. Raises PeerDeadError; BlockingIOError on the timeout of `set_timeouts`."""
    while len(into):
        count = sock.recv_into(into, len(into), socket.MSG_WAITALL)
        if not count:
            raise connection_closed(peer)
        into = into[count:]


class Segment:
    """A peer's segment, with the defaults of memory that stays as long as it is used.

    first_bytes, end_bytes: of its payload. in_turn: parts come from one peer at a time. posts: a
    started copy is reported to the peer. ends_with_peer: the peer's end may free the memory.
    """

    first_bytes = end_bytes = 0
    in_turn = posts = ends_with_peer = False

    @property
    def is_copied(self) -> bool:
        return True

    def copy(self, offset: int, into: Sequence[torch.Tensor]) -> None:
        """Start a copy, which has ended once `is_copied`. Raises PeerError."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is under way."""


class HostSegment(Segment):
    """Pages of the host."""

    def __init__(self, memory: memoryview) -> None:
        self.first_bytes, self.end_bytes, self._memory = FLAG_BYTES, len(memory), memory

    def copy(self, offset: int, into: Sequence[torch.Tensor]) -> None:
        for view in bytes_of(into):
            stop = offset + len(view)
            source = np.frombuffer(self._memory[offset:stop], np.uint8)
            np.copyto(np.frombuffer(view, np.uint8), source)
            offset = stop


class PeerGpuSegment(Segment):
    """Memory of another worker's GPU, opened at the first copy."""

    ends_with_peer = True

    def __init__(self, peer: str, terms: Terms) -> None:
        self.end_bytes, self._peer, self._handle = terms.segment_bytes, peer, terms.handle
        self._opened: DeviceSegment | None = None

    @property
    def is_copied(self) -> bool:
        return self._opened is None or self._opened.is_copied

    def copy(self, offset: int, into: Sequence[torch.Tensor]) -> None:
        try:
            if self._opened is None:
                self._opened = open_segment(self._handle, self.end_bytes, into[0].device)
        except ChannelError as error:
            raise PeerError(f"{self._peer}: {error.message}", self._peer) from None
        self._opened.copy(offset, into)


class WeightLink:
    """Link to one peer. `progress_s`: last sign of life. `local_process`: its process, if known.

    is_copying: its part is being copied from its segment.
    """

    def __init__(self, peer: str, sock: socket.socket, epoch: int, segment: Segment | None) -> None:
        sock.setblocking(False)
        self.peer, self.epoch = peer, epoch
        self.local_process = local_process.peer_process(sock)
        self.received_bytes = 0
        self.progress_s = monotonic_s()
        self._sock = sock
        self._segment = segment
        self._layer = 0
        self._head = b""
        self.is_copying = False
        self._pieces: list[torch.Tensor] = []
        self._into: list[memoryview] = []  # still to be filled, over TCP
        self._left = 0
        self._num_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def in_turn(self) -> bool:
        return self._segment is not None and self._segment.in_turn

    def request(self, layer: int, into: Sequence[torch.Tensor]) -> None:
        """Start filling `into`. Raises PeerError."""
        self._layer, self._pieces = layer, [piece for piece in into if piece.numel()]
        self._into = bytes_of(self._pieces) if self._segment is None else []
        self._num_bytes = sum(piece.nbytes for piece in self._pieces)
        self._head, self._left = b"", 0
        self.progress_s = monotonic_s()
        self._wake_at(REPLY.size)
        self._send(FETCH)

    def advance(self) -> bool:
        """Receive what has arrived. Returns True once `into` is full. Raises PeerError."""
        try:
            return self._advance()
        except BlockingIOError:
            return False
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    def abort(self) -> None:
        """End what the copying thread waits for. Thread-safe."""
        shut_down(self._sock)

    def close(self) -> None:
        self._sock.close()
        if self._segment is not None:
            self._segment.close()
        if self.local_process is not None:
            self.local_process.close()
        self._into = []
        self._pieces = []

    def _advance(self) -> bool:
        if self.is_copying:
            return self._end_copy()
        while not self._left:
            self._head += self._receive(REPLY.size - len(self._head))
            if len(self._head) < REPLY.size:
                return False
            kind, layer, value = REPLY.unpack(self._head)
            self._head = b""
            if kind == FAILED:
                self._fail(min(value, _MOST_TEXT_BYTES))
            if kind == KEEPALIVE:
                continue
            if kind != DATA or layer != self._layer:
                raise PeerError(
                    f"{self.peer} sent a reply that is not layer {self._layer}", self.peer
                )
            if self._segment is not None:
                self._copy(self._segment, value)
                return self._end_copy()
            if value != self._num_bytes:
                raise PeerError(
                    f"{self.peer} sent {value} bytes instead of {self._num_bytes}", self.peer
                )
            self._left = value
            self._wake_at(min(self._left, _WAKE_BYTES))
        while self._left:
            self._fill()
        return self._done()

    def _fill(self) -> None:
        """Receive straight into the tensors. Raises BlockingIOError, PeerDeadError."""
        count = self._sock.recvmsg_into(self._into[:_MOST_PIECES])[0]
        if not count:
            raise connection_closed(self.peer)
        self.progress_s = monotonic_s()
        self._left -= count
        while count:
            taken = min(count, len(self._into[0]))
            self._into[0] = self._into[0][taken:]
            count -= taken
            if not len(self._into[0]):
                self._into.pop(0)
        self._wake_at(min(self._left, _WAKE_BYTES))

    def _copy(self, segment: Segment, offset: int) -> None:
        if not segment.first_bytes <= offset <= segment.end_bytes - self._num_bytes:
            raise PeerError(f"{self.peer} sent an offset outside its segment", self.peer)
        segment.copy(offset, self._pieces)
        self.is_copying = True
        if segment.posts:
            self._send(POSTED)

    def _end_copy(self) -> bool:
        segment = self._segment
        if segment is not None and not segment.is_copied:
            if segment.in_turn and self._is_closed():  # the other half will not come
                raise connection_closed(self.peer)
            return False
        self.is_copying = False
        return self._done()

    def _done(self) -> bool:
        """Release the slot. Copied bytes are valid only if the connection is still open."""
        self._into, self._pieces = [], []
        self.received_bytes += self._num_bytes
        segment, process = self._segment, self.local_process
        if segment is not None:
            is_ending = segment.ends_with_peer and process is not None and process.is_ending
            if is_ending or self._is_closed():
                raise connection_closed(self.peer)
        self._send(DONE)
        return True

    def _is_closed(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _fail(self, text_bytes: int) -> None:
        try:
            text = self._receive(text_bytes).decode(errors="replace")
        except BlockingIOError:
            text = "unknown"
        raise PeerError(f"{self.peer} cannot send layer {self._layer}: {text}", self.peer)

    def _receive(self, count: int) -> bytes:
        data = self._sock.recv(count)
        if not data:
            raise connection_closed(self.peer)
        self.progress_s = monotonic_s()
        return data

    def _send(self, kind: int) -> None:
        try:
            self._sock.sendall(REQUEST.pack(kind, self._layer))
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    def _wake_at(self, num_bytes: int) -> None:
        """Let `poll` sleep until num_bytes have arrived (TCP only)."""
        if self._segment is None and num_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
