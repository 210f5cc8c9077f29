"""Accepts the connections of one listening socket.

Not the loop's own server: that would let everybody in, count nobody before his TLS handshake is
over, and turn in circles (asyncio) or drop clients without a word (uvloop) when the process has no
descriptors left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable

from cluster.http.connections import ConnectionTable
from cluster.http.protocol import HttpProtocol
from contracts.logs import event

log = logging.getLogger("tandem.front")

ACCEPTS_A_TURN = 64  # then others have their turn of the loop
BACKLOG = 2048
PAUSE_S = 0.5
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class HttpListener:
    """Has the three things that uvicorn wants of a server: sockets, close, wait_closed.

    refusal: what a client is told that there is no room for; empty where it would not understand
    (TLS).
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: ConnectionTable,
        make: Callable[[str], HttpProtocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        refusal: Callable[[], bytes],
    ) -> None:
        self.sockets = (listening,)
        self._listening = listening
        self._connections = connections
        self._make = make
        self._tls = tls
        self._handshake_s = handshake_s
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        if self._listening.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()

    async def wait_closed(self) -> None:
        """Nothing of ours is left once `close` has returned."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._pause_accepting(error)
                    return
                continue  # that client has gone already
            sock.setblocking(False)
            self._admit(sock, str(address[0]) if address else "")

    def _pause_accepting(self, error: OSError) -> None:
        """Others have used up the descriptors: somebody idle makes room, clients wait in the
        backlog meanwhile."""
        self._connections.make_room()
        event(
            log,
            "accept_failed",
            logging.WARNING,
            error=error.strerror,
            open=len(self._connections),
            hint="lower http.max_connections, or raise ulimit -n",
        )
        self._loop.remove_reader(self._listening.fileno())
        self._pause = self._loop.call_later(
            PAUSE_S, self._loop.add_reader, self._listening.fileno(), self._accept
        )

    def _admit(self, sock: socket.socket, address: str) -> None:
        protocol = self._make(address)
        if not self._connections.admit(protocol):
            with contextlib.suppress(OSError):
                sock.send(self._refusal())
                sock.shutdown(socket.SHUT_WR)
            sock.close()
            return
        opening = self._loop.create_task(self._open(sock, protocol))
        protocol.opening = opening
        # Not in the task itself: one that is cancelled before it begins runs none of its lines.
        opening.add_done_callback(functools.partial(self._opened, sock, protocol))

    async def _open(self, sock: socket.socket, protocol: HttpProtocol) -> None:
        """Joins socket and protocol, which from then on owns it; over TLS after the handshake."""
        more = {"ssl_handshake_timeout": self._handshake_s} if self._tls is not None else {}
        await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls, **more)

    def _opened(
        self, sock: socket.socket, protocol: HttpProtocol, opening: asyncio.Task[None]
    ) -> None:
        protocol.opening = None
        error = None if opening.cancelled() else opening.exception()
        if error is None and not opening.cancelled():
            return
        sock.close()
        self._connections.leave(protocol)
        if error is not None and not isinstance(error, OSError):  # OSError: the client's handshake
            event(log, "connection_setup_failed", logging.ERROR, error)
