"""Server of expert weights, beside the compute.

Each peer has a connection and a thread that mostly waits in the kernel. Nothing is copied: over TCP
the kernel sends from the segment's pages (sendfile), over shared memory the peer reads them, and
between GPUs of a node copies them (actors/gather/device_segment.py); to GPUs of other nodes NCCL
sends them (actors/gather/nccl_exchange.py). Where
peers may be on other nodes it serves both ways, because a replaced worker may no longer share
memory.
"""

import logging
import os
import socket
import threading

import msgspec

from actors.channels.handshake import Identity, Remote
from actors.channels.listener import (
    ADDRESS_SEPARATOR,
    HandshakeListener,
    listen_tcp,
    listen_unix,
    shut_down,
)
from actors.channels.local_process import LocalProcess, is_hung, peer_process
from actors.gather.nccl_exchange import NcclExchange, NcclPart
from actors.gather.weight_link import (
    DATA,
    DONE,
    FAILED,
    FETCH,
    KEEPALIVE,
    POSTED,
    PURPOSE,
    REPLY,
    REQUEST,
    Terms,
    check_terms,
    read_terms,
    receive_into,
    set_timeouts,
)
from actors.gather.weight_shard import Shard
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, HandshakeError, PeerError, PeerHungError
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

_SEND_BYTES = 1 << 20  # progress is recorded at least this often


class WeightServer:
    """Serves a shard to peers with matching terms, each on its own thread.

    sent_bytes: so far, including reads from shared memory.
    """

    def __init__(
        self,
        me: Identity,
        terms: Terms,
        shard: Shard,
        config: ChannelConfig,
        exchange: NcclExchange | None = None,
    ) -> None:
        """exchange: for peers on other nodes, if the shard is in the memory of a GPU."""
        self._me, self._terms, self._config = me, terms, config
        self._shard, self._exchange = shard, exchange
        self._lock = threading.Lock()  # guards all below
        self._serving: dict[str, tuple[socket.socket, threading.Thread]] = {}
        self._epochs: dict[str, int] = {}  # the newest of each name
        self._closed = False
        self._listeners: list[HandshakeListener] = []
        self.sent_bytes = 0

    def listen(self, host: str, *, shared_memory: bool, tcp: bool = True) -> str:
        """Start serving on a Unix socket, on TCP, or on both. Returns the address for peers."""
        opened = [*([listen_unix()] if shared_memory else []), *([listen_tcp(host)] if tcp else [])]
        for sock, _ in opened:
            self._listeners.append(
                HandshakeListener(sock, self._me, answer=self._check_peer, accepted=self._accept)
            )
        return ADDRESS_SEPARATOR.join(address for _, address in opened)

    def close(self) -> None:
        """End all connections and threads. May be called twice."""
        with self._lock:
            self._closed = True
            serving, self._serving = list(self._serving.values()), {}
        for listener in self._listeners:
            listener.close(self._config.connect_timeout_s)
        for sock, thread in serving:
            shut_down(sock)
            thread.join(self._config.connect_timeout_s)

    def _check_peer(self, remote: Remote) -> bytes:
        if remote.purpose != PURPOSE:
            raise HandshakeError(f"{self._me.name} serves {PURPOSE}, not {remote.purpose}")
        terms = read_terms(remote.extra, remote.name)
        with self._lock:
            check_terms(terms, self._terms, remote.name, self._epochs.get(remote.name, 0))
            self._epochs[remote.name] = terms.epoch
        return msgspec.msgpack.encode(self._terms)

    def _accept(self, sock: socket.socket, remote: Remote) -> None:
        """Serve a connection; it replaces an earlier one of the same peer."""
        name = f"{self._me.name}-{PURPOSE}-{remote.name}"
        thread = threading.Thread(
            target=self._run, args=(sock, remote.name), name=name, daemon=True
        )
        with self._lock:
            if self._closed:
                sock.close()
                return
            before = self._serving.pop(remote.name, None)
            self._serving[remote.name] = sock, thread
        if before is not None:
            shut_down(before[0])
        thread.start()

    def _run(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                set_timeouts(sock, 0.0, socket.SO_RCVTIMEO)  # idle peers request nothing
                set_timeouts(sock, self._config.heartbeat_timeout_s, socket.SO_SNDTIMEO)
                self._serve(sock, peer)
        except PeerHungError as error:
            event(log, "weights_peer_lost", logging.WARNING, peer=peer, reason=error)
        except (OSError, PeerError) as error:
            event(log, "weights_peer_disconnected", peer=peer, reason=error)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        """Answer requests until the connection ends. Raises OSError, PeerError."""
        if sock.family == socket.AF_UNIX and self._shard.segment is None:
            socket.send_fds(sock, [b"\0"], [self._shard.fd])
        process, part = peer_process(sock), None
        if sock.family != socket.AF_UNIX and self._exchange is not None:
            part = self._exchange.connect(sock, peer, serves=True)
            set_timeouts(sock, 0.0, socket.SO_RCVTIMEO)
        try:
            while True:
                self._serve_layer(sock, peer, self._receive(sock, peer, FETCH), process, part)
        finally:
            if part is not None:
                part.close()
            if process is not None:
                process.close()

    def _receive(
        self, sock: socket.socket, peer: str, expected: int, expected_layer: int | None = None
    ) -> int:
        """Return the layer of the next request, which must be of that kind, and of that layer."""
        request = bytearray(REQUEST.size)
        receive_into(sock, memoryview(request), peer)
        kind, layer = REQUEST.unpack(request)
        if kind != expected or expected_layer not in (None, layer):
            raise PeerError(f"{peer} sent a request out of turn", peer)
        return int(layer)

    def _serve_layer(
        self,
        sock: socket.socket,
        peer: str,
        layer: int,
        process: LocalProcess | None,
        part: NcclPart | None,
    ) -> None:
        slot = self._wait_for(sock, peer, layer)
        try:
            if part is None:
                self._send(sock, peer, layer, slot, process)
                self._receive(sock, peer, DONE, layer)
            else:
                self._send_by_nccl(sock, peer, layer, slot, part)
        except BaseException:
            shut_down(sock)  # the peer must see the end before its slot is used again
            raise
        finally:
            self._shard.release(layer)

    def _send_by_nccl(
        self, sock: socket.socket, peer: str, layer: int, slot: int, part: NcclPart
    ) -> None:
        """Send a part to another node, once a stream is free, and wait for its end."""
        exchange, pieces = self._exchange, self._shard.pieces[slot]
        assert exchange is not None
        while (stream := exchange.take_stream(self._config.heartbeat_interval_s)) is None:
            sock.sendall(REPLY.pack(KEEPALIVE, layer, 0))
        try:
            set_timeouts(sock, self._config.heartbeat_timeout_s, socket.SO_RCVTIMEO)
            if part.leads:
                part.transfer(pieces, stream)
            sock.sendall(REPLY.pack(DATA, layer, 0))
            if not part.leads:
                self._receive(sock, peer, POSTED, layer)
                part.transfer(pieces, stream)
            self._receive(sock, peer, DONE, layer)
            set_timeouts(sock, 0.0, socket.SO_RCVTIMEO)
        except BaseException:
            shut_down(sock)
            part.close()  # what is under way ends, and the stream is free
            raise
        finally:
            exchange.return_stream(stream)
        with self._lock:
            self.sent_bytes += self._shard.part.num_bytes

    def _wait_for(self, sock: socket.socket, peer: str, layer: int) -> int:
        """Return the layer's slot once it is loaded; send keepalives meanwhile."""
        try:
            self._shard.request(layer)
        except ChannelError as error:
            raise PeerError(f"{peer}: {error.message}", peer) from None
        try:
            while (slot := self._shard.take(layer, self._config.heartbeat_interval_s)) is None:
                sock.sendall(REPLY.pack(KEEPALIVE, layer, 0))
        except BaseException as error:
            self._shard.cancel(layer)
            if not isinstance(error, ChannelError):
                raise
            text = error.message.encode()
            sock.sendall(REPLY.pack(FAILED, layer, len(text)) + text)
            raise PeerError(error.message, peer) from None
        return slot

    def _send(
        self, sock: socket.socket, peer: str, layer: int, slot: int, process: LocalProcess | None
    ) -> None:
        offset = self._shard.offset_bytes(slot)
        with self._lock:
            self.sent_bytes += self._shard.part.num_bytes
        if sock.family == socket.AF_UNIX:
            sock.sendall(REPLY.pack(DATA, layer, offset))
            return
        sock.sendall(REPLY.pack(DATA, layer, self._shard.part.num_bytes))
        end, progress_s = offset + self._shard.part.num_bytes, monotonic_s()
        timeout_s = self._config.heartbeat_timeout_s
        while offset < end:
            try:
                count = min(end - offset, _SEND_BYTES)
                offset += os.sendfile(sock.fileno(), self._shard.fd, offset, count)
                progress_s = monotonic_s()
            except BlockingIOError:  # SO_SNDTIMEO
                if is_hung(monotonic_s() - progress_s, timeout_s, process):
                    raise PeerHungError(
                        f"{peer} received nothing for {timeout_s:g} s", peer
                    ) from None
        # sendfile may leave the last segment corked for 200 ms
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
