"""Serves a worker's part of the experts to its peers, beside the compute.

One thread that copies nothing: over TCP the kernel sends from the segment's pages (sendfile), over
shared memory the peer reads them. Where peers may be on other nodes it serves both ways at once,
because a replaced worker may no longer share memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque

import msgspec

from actors.channels import local_process
from actors.channels.base import connection_closed
from actors.channels.handshake import Identity, Remote
from actors.channels.listener import ADDRESS_SEPARATOR, HandshakeListener, listen_tcp, listen_unix
from actors.channels.local_process import is_hung
from actors.gather.protocol import (
    DATA,
    DONE,
    FAILED,
    FETCH,
    KEEPALIVE,
    PURPOSE,
    REPLY,
    REQUEST,
    Terms,
    check_terms,
    read_terms,
)
from actors.gather.weight_shard import Shard, WindowedShard
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, HandshakeError, PeerError, PeerHungError
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

_SEND_BYTES = 1 << 20  # per turn of a peer


class _Peer:
    """One connection. A layer is requested, then held while it is sent, then released at DONE."""

    def __init__(self, sock: socket.socket, name: str, now_s: float) -> None:
        sock.setblocking(False)
        self.sock, self.name = sock, name
        self.shared = sock.family == socket.AF_UNIX
        self.local_process = local_process.peer_process(sock)
        self.unparsed = b""  # part of a request
        self.requested: int | None = None
        self.held: int | None = None
        self.head = b""  # unsent head of a reply
        self.offset, self.left = 0, 0
        self.progress_s = now_s

    @property
    def is_served(self) -> bool:
        return bool(self.requested is not None or self.head or self.left)

    def close(self) -> None:
        self.sock.close()
        if self.local_process is not None:
            self.local_process.close()


class WeightServer:
    """Serves any number of peers after `listen`."""

    def __init__(
        self, me: Identity, terms: Terms, shard: Shard, part_bytes: int, config: ChannelConfig
    ) -> None:
        self._me, self._terms, self._shard, self._config = me, terms, shard, config
        self._part_bytes = part_bytes
        self.sent_bytes = 0  # including those that peers read from shared memory
        self._epochs: dict[str, int] = {}  # the newest of each name
        self._arrived: deque[tuple[socket.socket, str]] = deque()
        self._peers: dict[int, _Peer] = {}
        self._listeners: list[HandshakeListener] = []
        self._closed = False
        self._lock = threading.Lock()  # guards _wake_fd
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        if isinstance(shard, WindowedShard):
            shard.ready = self._wake
        self._thread = threading.Thread(target=self._run, name=f"{me.name}-weights", daemon=True)

    def listen(self, host: str, *, shared_memory: bool, tcp: bool) -> str:
        """Start serving, in one way or both. Returns the address for the peers' `connect`."""
        opened = [*([listen_unix()] if shared_memory else []), *([listen_tcp(host)] if tcp else [])]
        self._thread.start()
        for sock, _ in opened:
            listener = HandshakeListener(
                sock, self._me, answer=self._check_peer, accepted=self._accept
            )
            self._listeners.append(listener)
        return ADDRESS_SEPARATOR.join(address for _, address in opened)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            listener.close(self._config.connect_timeout_s)
        if self._listeners:
            self._wake()
            self._thread.join(self._config.connect_timeout_s)
        for peer in list(self._peers.values()):
            self._drop(peer)
        for sock, _ in self._arrived:
            sock.close()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # --- handshake threads

    def _check_peer(self, remote: Remote) -> bytes:
        if remote.purpose != PURPOSE:
            raise HandshakeError(f"{self._me.name} serves weights, not {remote.purpose}")
        remote_terms = read_terms(remote.extra, remote.name)
        check_terms(remote_terms, self._terms, remote.name, self._epochs.get(remote.name, 0))
        self._epochs[remote.name] = remote_terms.epoch
        return msgspec.msgpack.encode(self._terms)

    def _accept(self, sock: socket.socket, remote: Remote) -> None:
        if sock.family == socket.AF_UNIX:
            try:
                socket.send_fds(sock, [b"\0"], [self._shard.slots.fd])
            except OSError:
                sock.close()
                return
        self._arrived.append((sock, remote.name))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # --- the serving thread

    def _run(self) -> None:
        while not self._closed:
            busy = any(peer.is_served for peer in self._peers.values())
            events = self._poll.poll(1e3 * self._config.heartbeat_interval_s if busy else None)
            while self._arrived:
                self._add(*self._arrived.popleft())
            for fd, mask in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif (peer := self._peers.get(fd)) is not None:
                    self._try(peer, readable=bool(mask & ~select.POLLOUT))
            now_s = monotonic_s()
            for peer in list(self._peers.values()):
                self._maintain(peer, now_s)

    def _add(self, sock: socket.socket, name: str) -> None:
        for peer in list(self._peers.values()):
            if peer.name == name:  # it reconnected
                self._drop(peer)
        self._peers[sock.fileno()] = _Peer(sock, name, monotonic_s())
        self._poll.register(sock, select.POLLIN)

    def _drop(self, peer: _Peer) -> None:
        """Close a connection and free its slot; the peer must not use the slot afterwards."""
        del self._peers[peer.sock.fileno()]
        self._poll.unregister(peer.sock)
        peer.close()
        if peer.requested is not None:
            self._shard.cancel(peer.requested)
        if peer.held is not None:
            self._shard.release(peer.held)

    def _try(self, peer: _Peer, *, readable: bool) -> None:
        try:
            if readable:
                self._read_requests(peer)
            self._send(peer)
        except (PeerError, OSError) as error:
            event(log, "weights_peer_disconnected", peer=peer.name, reason=error)
            self._drop(peer)

    def _maintain(self, peer: _Peer, now_s: float) -> None:
        """Send finished layers and keepalives; drop a peer that stopped receiving."""
        try:
            if peer.requested is not None:
                self._reply(peer, peer.requested, now_s)
            elif (peer.head or peer.left) and is_hung(
                now_s - peer.progress_s, self._config.heartbeat_timeout_s, peer.local_process
            ):
                heartbeat_timeout_s = self._config.heartbeat_timeout_s
                raise PeerHungError(
                    f"{peer.name} received nothing for {heartbeat_timeout_s:g} s", peer.name
                )
        except (PeerError, OSError) as error:
            event(log, "weights_peer_lost", logging.WARNING, peer=peer.name, reason=error)
            self._drop(peer)

    def _read_requests(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(256)
        except BlockingIOError:
            return
        if not data:
            raise connection_closed(peer.name)
        peer.unparsed += data
        while len(peer.unparsed) >= REQUEST.size:
            kind, layer = REQUEST.unpack_from(peer.unparsed)
            peer.unparsed = peer.unparsed[REQUEST.size :]
            if kind == DONE and layer == peer.held:
                peer.held = None
                self._shard.release(layer)
            elif kind == FETCH and peer.requested is None and peer.held is None:
                try:
                    self._shard.request(layer)
                except ChannelError as error:
                    raise PeerError(f"{peer.name}: {error.message}", peer.name) from None
                peer.requested = layer
                self._reply(peer, layer, monotonic_s())
            else:
                raise PeerError(f"{peer.name} sent a request out of turn", peer.name)

    def _reply(self, peer: _Peer, layer: int, now_s: float) -> None:
        try:
            slot = self._shard.take(layer)
        except ChannelError as error:
            text = error.message.encode()
            peer.sock.sendall(REPLY.pack(FAILED, layer, len(text)) + text)
            raise PeerError(error.message, peer.name) from None
        if slot is None:
            if now_s - peer.progress_s >= self._config.heartbeat_interval_s:
                peer.progress_s = now_s
                peer.sock.sendall(REPLY.pack(KEEPALIVE, layer, 0))
            return
        peer.requested, peer.held, peer.progress_s = None, layer, now_s
        self.sent_bytes += self._part_bytes
        peer.offset = self._shard.slots.offset_bytes(slot)
        if peer.shared:
            peer.head = REPLY.pack(DATA, layer, peer.offset)
        else:
            peer.head, peer.left = REPLY.pack(DATA, layer, self._part_bytes), self._part_bytes
        self._send(peer)

    def _send(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.head:
                peer.head = peer.head[peer.sock.send(peer.head) :]
            if peer.left:
                count = min(peer.left, _SEND_BYTES)
                sent = os.sendfile(peer.sock.fileno(), self._shard.slots.fd, peer.offset, count)
                peer.offset += sent
                peer.left -= sent
                peer.progress_s = monotonic_s()
                if not peer.left:  # sendfile may leave the last segment corked for 200 ms
                    peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = peer.head or peer.left
        self._poll.modify(peer.sock, select.POLLIN | (select.POLLOUT if pending else 0))
