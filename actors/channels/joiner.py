"""How two endpoints become a link: two sockets, each opened with a handshake.

"data" and "pulse" (heartbeats), tied together by a random id      -> Joint
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from actors.channels import handshake
from actors.channels.handshake import Identity, Remote
from actors.channels.link import Joint
from actors.channels.listener import Listener, dial
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandshakeError

_DATA, _PULSE = "channel-data", "channel-pulse"


class _Extra(msgspec.Struct, frozen=True, array_like=True):
    """What both handshakes of a link carry."""

    backend: str
    link_id: bytes
    offer: bytes = b""


class _Half(msgspec.Struct, frozen=True):
    """The socket of a link that came first. The initiator dials the data socket first, but each
    handshake ends on a thread of its own: here the pulse socket may be first."""

    sock: socket.socket
    name: str
    purpose: str
    since_s: float


class Joiner:
    """Makes joints. `joined` is called on a handshake's thread and takes over the joint's sockets;
    `linked` says, on any thread, whether a name is taken."""

    def __init__(
        self,
        me: Identity,
        backend: str,
        deadline_s: float,
        *,
        linked: Callable[[str], bool],
        joined: Callable[[Joint], None],
    ) -> None:
        self._me = me
        self._backend = backend
        self._deadline_s = deadline_s
        self._linked = linked
        self._joined = joined
        self._lock = threading.Lock()
        self._halves: dict[bytes, _Half] = {}
        self._closed = False
        self._listener: Listener | None = None

    def listen(self, sock: socket.socket) -> None:
        self._listener = Listener(sock, self._me, answer=self._judge, accepted=self._accepted)

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def connect(self, peer: str, address: str, offer: bytes) -> Joint:
        """Two proven sockets to `peer`. Raises HandshakeError or ChannelError in deadline_s."""
        end_s = monotonic_s() + self._deadline_s
        extra = _Extra(self._backend, secrets.token_bytes(16), offer)
        data = self._dial(peer, address, _DATA, extra, end_s)
        try:
            pulse = self._dial(peer, address, _PULSE, extra, end_s)
        except ChannelError:
            data.close()
            raise
        return Joint(peer=peer, data=data, pulse=pulse, initiator=True, offer=offer)

    def close(self) -> None:
        """Afterwards `joined` is not called any more."""
        with self._lock:
            self._closed = True
            halves, self._halves = list(self._halves.values()), {}
        for half in halves:
            half.sock.close()
        if self._listener is not None:
            self._listener.close(self._deadline_s)

    def _dial(
        self, peer: str, address: str, purpose: str, extra: _Extra, end_s: float
    ) -> socket.socket:
        sock = dial(address, max(end_s - monotonic_s(), 1e-3))
        try:
            handshake.initiate(
                sock,
                self._me,
                purpose=purpose,
                to=peer,
                extra=msgspec.msgpack.encode(extra),
                deadline_s=max(end_s - monotonic_s(), 1e-3),
            )
        except HandshakeError:
            sock.close()
            raise
        return sock

    def _judge(self, remote: Remote) -> bytes:
        """Refuses a proven peer that nevertheless does not fit (handshake thread)."""
        extra = _extra(remote)
        if extra.backend != self._backend:
            raise HandshakeError(
                f"it uses backend {extra.backend}, {self._me.name} uses {self._backend}: "
                "set channel.backend to one of them"
            )
        if self._linked(remote.name):
            raise HandshakeError(f"{remote.name} is linked to {self._me.name} already")
        return b""

    def _accepted(self, sock: socket.socket, remote: Remote) -> None:
        """Keeps the first socket of a link, joins with the second (handshake thread)."""
        extra = _extra(remote)
        mine = _Half(sock, remote.name, remote.purpose, monotonic_s())
        with self._lock:
            self._drop_late()
            other = self._halves.pop(extra.link_id, None)
            if other is None and not self._closed:
                self._halves[extra.link_id] = mine
                return
        sockets = {half.purpose: half.sock for half in (mine, other) if half is not None}
        if other is None or other.name != mine.name or sockets.keys() != {_DATA, _PULSE}:
            for half in (mine, other):
                if half is not None:
                    half.sock.close()
            return
        self._joined(
            Joint(
                peer=mine.name,
                data=sockets[_DATA],
                pulse=sockets[_PULSE],
                initiator=False,
                offer=extra.offer,
            )
        )

    def _drop_late(self) -> None:
        """Forgets sockets whose other half never came."""
        before_s = monotonic_s() - self._deadline_s
        for link_id, half in list(self._halves.items()):
            if half.since_s < before_s:
                self._halves.pop(link_id).sock.close()


def _extra(remote: Remote) -> _Extra:
    try:
        return msgspec.msgpack.decode(remote.extra, type=_Extra)
    except msgspec.MsgspecError:
        raise HandshakeError(f"{remote.name} did not come for a channel") from None
