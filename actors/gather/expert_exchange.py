"""Transfer of single experts between expert ranks, beside the token path.

    peer     REQUEST layer, expert
    server   DATA, bytes | as they stand in memory       or   FAILED, bytes | reason

Each requesting peer has a connection and a thread that sends; the receiver sets the rate. Both
sides must use the same expert layout (models/experts/expert_layout.py). Where they do not, the
handshake fails and the checkpoint is read instead.

`WeightServer` sends whole layers from one memfd; this server sends single experts from ordinary
memory that changes with each placement.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from torch import Tensor

from actors.channels import handshake
from actors.channels.base import connection_lost
from actors.channels.handshake import Identity
from actors.channels.listener import (
    dial,
)
from actors.gather.protocol import Terms, check_terms, digest, read_terms
from actors.gather.weight_link import bytes_of, receive_into, set_timeouts
from actors.gather.weight_server import PeerServer
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.ranks import Group, RankSpec, rank_name
from models.experts.expert_layout import ExpertLayout

PURPOSE: Final = "experts"
REQUEST = struct.Struct("<II")  # layer, expert
REPLY = struct.Struct("<BQ")  # kind, bytes that follow
DATA, FAILED = 1, 2
NICE: Final = 10
_CHUNK_BYTES: Final = 1 << 20
_MOST_TEXT_BYTES: Final = 4096

# (layer, expert) -> the expert's memory, or None if it is not here. Thread-safe.
FindExpert = Callable[[int, int], Sequence[Tensor] | None]


class Limiter(Protocol):
    def acquire(self, num_bytes: int) -> None:
        """Return once more bytes are allowed."""


class ExpertExchange:
    """Sender and receiver of one expert rank. The loading thread calls `fetch`."""

    def __init__(self, spec: RankSpec, layout: ExpertLayout, find: FindExpert) -> None:
        me = Identity(name=spec.name, token=spec.token, epoch=None)
        terms = Terms(spec.epoch, digest(layout.spec, str(layout.dtype)), layout.digest)
        self._on_one_machine = spec.backend == "shm"
        self.sender = ExpertSender(me, terms, find, spec.config.channel)
        self.receiver = ExpertReceiver(me, terms, spec.config.channel)
        self.introduce, self.fetch = self.receiver.introduce, self.receiver.fetch

    def listen(self, host: str) -> str:
        """Return the address for the others' `introduce`."""
        return self.sender.listen(host, shared_memory=self._on_one_machine)

    def close(self) -> None:
        """Close both directions. May be called twice."""
        self.receiver.close()
        self.sender.close()


class ExpertSender(PeerServer):
    """Serves single experts from the memory that `find` returns."""

    purpose = PURPOSE
    log_level = logging.DEBUG

    def __init__(self, me: Identity, terms: Terms, find: FindExpert, config: ChannelConfig) -> None:
        super().__init__(me, terms, config)
        self._find = find

    def _serve(self, sock: socket.socket, peer: str) -> None:
        lower_thread_priority()
        request = bytearray(REQUEST.size)
        while True:
            receive_into(sock, memoryview(request), peer)
            self._send_expert(sock, *REQUEST.unpack(request))

    def _send_expert(self, sock: socket.socket, layer: int, expert: int) -> None:
        memory = self._find(layer, expert)
        if memory is None:
            text = f"expert {expert} of layer {layer} is not on {self._me.name}".encode()
            sock.sendall(REPLY.pack(FAILED, len(text)) + text)
            return
        pieces = bytes_of(memory)
        sock.sendall(REPLY.pack(DATA, sum(map(len, pieces))))
        for piece in pieces:
            for first in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[first : first + _CHUNK_BYTES]
                sock.sendall(chunk)
                self._count(len(chunk))


class ExpertReceiver:
    """Fetches experts on the loading thread. `introduce` and `close` are thread-safe."""

    def __init__(self, me: Identity, terms: Terms, config: ChannelConfig) -> None:
        self._me, self._terms, self._config = me, terms, config
        self._addresses: dict[str, str] = {}
        self._links: dict[str, socket.socket] = {}
        self.received_bytes = 0

    def introduce(self, addresses: Mapping[str, str]) -> None:
        """Record the addresses of peers. They are dialed on the first fetch."""
        self._addresses.update(addresses)

    def fetch(
        self, rank: int, key: tuple[int, int], into: Sequence[Tensor], limiter: Limiter
    ) -> None:
        """Fill `into`. Raises ChannelError, and closes the link, if the rank does not send it."""
        peer = rank_name(Group.EXPERT, rank)
        try:
            self._fetch(peer, key, into, limiter)
        except BlockingIOError:
            self._close(peer)
            timeout_s = self._config.heartbeat_timeout_s
            raise PeerHungError(f"{peer} sent nothing for {timeout_s:g} s", peer) from None
        except OSError as error:
            self._close(peer)
            raise connection_lost(peer, error) from None
        except BaseException:  # interrupted: the rest of the reply is still in the socket
            self._close(peer)
            raise

    def close(self) -> None:
        for peer in list(self._links):
            self._close(peer)

    def _fetch(
        self, peer: str, key: tuple[int, int], into: Sequence[Tensor], limiter: Limiter
    ) -> None:
        link = self._links.get(peer) or self._dial(peer)
        link.sendall(REQUEST.pack(*key))
        head = bytearray(REPLY.size)
        receive_into(link, memoryview(head), peer)
        kind, num_bytes = REPLY.unpack(head)
        pieces = bytes_of(into)
        if kind == FAILED:
            text = bytearray(min(num_bytes, _MOST_TEXT_BYTES))
            receive_into(link, memoryview(text), peer)
            raise PeerError(f"{peer}: {text.decode(errors='replace')}", peer)
        if kind != DATA or num_bytes != sum(map(len, pieces)):
            expected_bytes = sum(map(len, pieces))
            raise PeerError(
                f"{peer} sent {num_bytes} bytes for an expert of {expected_bytes}", peer
            )
        for piece in pieces:
            for first in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[first : first + _CHUNK_BYTES]
                receive_into(link, chunk, peer)
                self.received_bytes += len(chunk)
                limiter.acquire(len(chunk))

    def _dial(self, peer: str) -> socket.socket:
        address = self._addresses.get(peer)
        if address is None:
            raise ChannelError(f"{peer} does not serve experts")
        end_s = monotonic_s() + self._config.heartbeat_timeout_s
        sock = dial(address, self._config.heartbeat_timeout_s)
        try:
            remote = handshake.initiate(
                sock,
                self._me,
                purpose=PURPOSE,
                to=peer,
                extra=msgspec.msgpack.encode(self._terms),
                deadline_s=max(end_s - monotonic_s(), 1e-3),
            )
            check_terms(read_terms(remote.extra, peer), self._terms, peer, 0)
        except ChannelError:
            sock.close()
            raise
        set_timeouts(sock, self._config.heartbeat_timeout_s, socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        self._links[peer] = sock
        return sock

    def _close(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread below the loop's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
