"""Sets up a link: two sockets, "data" and "heartbeat", tied together by a random id.

Each socket is opened with a handshake. The handshakes also compare clocks, so that each side can
convert the other's send times: the acceptor sends its time in its answer, the initiator sends the
resulting offset with the heartbeat socket.

Both sides send their epoch. Once a name has been seen at an epoch, older ones are refused: a
replaced rank cannot rejoin, however late it wakes up.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from actors.channels import handshake
from actors.channels.handshake import Identity, Remote
from actors.channels.link import LinkSockets
from actors.channels.listener import HandshakeListener, dial
from actors.channels.local_process import boot_id
from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError, HandshakeError
from contracts.messages import FRAME_ERRORS
from contracts.placement import placement_mismatch

_DATA, _HEARTBEAT = "channel-data", "channel-heartbeat"


class _Extra(msgspec.Struct, frozen=True, array_like=True):
    """Data of both handshakes of a link."""

    backend: str
    link_id: bytes
    offer: bytes = b""
    clock_offset_s: float = 0.0  # initiator's clock minus the acceptor's, with the heartbeat socket
    placement: str = ""  # digest of the placement of experts


class _ClockReading(msgspec.Struct, frozen=True, array_like=True):
    """The acceptor's answer. Processes with an equal `boot` share one clock."""

    boot: str
    now_s: float
    epoch: int


_decode_extra = msgspec.msgpack.Decoder(_Extra).decode
_decode_reading = msgspec.msgpack.Decoder(_ClockReading).decode
_Data = TypeVar("_Data")


class _PendingSocket(msgspec.Struct, frozen=True):
    """The first socket of a link.

    The initiator dials data first, but handshakes run on threads, so either may be first here.
    """

    sock: socket.socket
    remote: Remote
    extra: _Extra
    since_s: float


class LinkSetup:
    """Makes pairs of link sockets.

    joined: called on a handshake thread, owns the sockets. linked: thread-safe, returns whether a
    name is linked at this epoch or a newer one.
    """

    def __init__(
        self,
        me: Identity,
        backend: str,
        deadline_s: float,
        clock: Clock,
        *,
        linked: Callable[[str, int], bool],
        joined: Callable[[LinkSockets], None],
        placement: str = "",
    ) -> None:
        self._me, self._epoch = me, me.epoch or 0
        self._backend = backend
        self._deadline_s = deadline_s
        self._clock = clock
        self._placement = placement
        self._linked = linked
        self._joined = joined
        self._lock = threading.Lock()
        self._pending: dict[bytes, _PendingSocket] = {}
        self._epochs: dict[str, int] = {}  # the newest seen of each name
        self._closed = False
        self._listener: HandshakeListener | None = None

    def listen(self, sock: socket.socket) -> None:
        self._listener = HandshakeListener(
            sock, self._me, answer=self._check_peer, accepted=self._on_accepted
        )

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def connect(self, peer: str, address: str, offer: bytes) -> LinkSockets:
        """Return two authenticated sockets. Thread-safe. Raises HandshakeError, ChannelError."""
        end_s = monotonic_s() + self._deadline_s
        extra = _Extra(self._backend, secrets.token_bytes(16), offer, placement=self._placement)
        data, offset_s, epoch = self._dial(peer, address, _DATA, extra, end_s)
        extra = msgspec.structs.replace(extra, clock_offset_s=-offset_s)
        try:
            heartbeat, _, _ = self._dial(peer, address, _HEARTBEAT, extra, end_s)
        except ChannelError:
            data.close()
            raise
        return LinkSockets(
            peer=peer,
            data=data,
            heartbeat=heartbeat,
            initiator=True,
            offer=offer,
            clock_offset_s=offset_s,
            epoch=epoch,
        )

    def close(self) -> None:
        """Close pending sockets and the listener. `joined` is not called afterwards."""
        with self._lock:
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.sock.close()
        if self._listener is not None:
            self._listener.close(self._deadline_s)

    def _dial(
        self, peer: str, address: str, purpose: str, extra: _Extra, end_s: float
    ) -> tuple[socket.socket, float, int]:
        """Return an authenticated socket, the peer's clock minus ours, and the peer's epoch."""
        sock = dial(address, max(end_s - monotonic_s(), 1e-3))
        try:
            start_s = self._clock()
            remote = handshake.initiate(
                sock,
                self._me,
                purpose=purpose,
                to=peer,
                extra=msgspec.msgpack.encode(extra),
                deadline_s=max(end_s - monotonic_s(), 1e-3),
            )
            reading = _data_of(remote, _decode_reading, "answer as")
            self._check_epoch(peer, reading.epoch)
            return sock, _offset_s(reading, (start_s + self._clock()) / 2), reading.epoch
        except HandshakeError:
            sock.close()
            raise

    def _check_peer(self, remote: Remote) -> bytes:
        """Refuse an authenticated peer whose settings do not match. Runs on a handshake thread."""
        extra = _data_of(remote, _decode_extra, "request")
        if extra.backend != self._backend:
            raise HandshakeError(
                f"it uses backend {extra.backend}, {self._me.name} uses {self._backend}: "
                "set channel.backend to one of them"
            )
        if extra.placement != self._placement:
            raise HandshakeError(placement_mismatch("it", extra.placement, self._placement))
        epoch = remote.epoch or 0
        self._check_epoch(remote.name, epoch)
        if self._linked(remote.name, epoch):
            raise HandshakeError(f"{remote.name} is linked to {self._me.name} already")
        return msgspec.msgpack.encode(_ClockReading(boot_id(), self._clock(), self._epoch))

    def _check_epoch(self, name: str, epoch: int) -> None:
        """Raise HandshakeError for a rank that has been replaced."""
        with self._lock:
            newest = self._epochs.get(name, 0)
            if epoch < newest:
                raise HandshakeError(
                    f"{name} is at epoch {epoch}, which has been replaced by {newest}"
                )
            self._epochs[name] = epoch

    def _on_accepted(self, sock: socket.socket, remote: Remote) -> None:
        """Keep the first socket of a link, join with the second. Runs on a handshake thread."""
        extra = _data_of(remote, _decode_extra, "request")
        arrived = _PendingSocket(sock, remote, extra, monotonic_s())
        with self._lock:
            self._close_expired()
            other = self._pending.pop(extra.link_id, None)
            if other is None and not self._closed:
                self._pending[extra.link_id] = arrived
                return
        pair = [arrived] if other is None else [arrived, other]
        sockets = {one.remote.purpose: one.sock for one in pair}
        senders = {(one.remote.name, one.remote.epoch) for one in pair}
        if len(senders) > 1 or sockets.keys() != {_DATA, _HEARTBEAT}:
            for one in pair:
                one.sock.close()
            return
        self._joined(
            LinkSockets(
                peer=remote.name,
                data=sockets[_DATA],
                heartbeat=sockets[_HEARTBEAT],
                initiator=False,
                offer=extra.offer,
                clock_offset_s=sum(one.extra.clock_offset_s for one in pair),
                epoch=remote.epoch or 0,
            )
        )

    def _close_expired(self) -> None:
        """Close sockets whose counterpart never came."""
        before_s = monotonic_s() - self._deadline_s
        for link_id, one in list(self._pending.items()):
            if one.since_s < before_s:
                self._pending.pop(link_id).sock.close()


def _data_of(remote: Remote, decode: Callable[[bytes], _Data], verb: str) -> _Data:
    try:
        return decode(remote.extra)
    except FRAME_ERRORS:
        raise HandshakeError(f"{remote.name} did not {verb} a channel") from None


def _offset_s(reading: _ClockReading, now_s: float) -> float:
    """Return the acceptor's clock minus ours, which read now_s at that time."""
    return 0.0 if reading.boot == boot_id() else reading.now_s - now_s
