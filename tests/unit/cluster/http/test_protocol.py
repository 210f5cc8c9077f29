"""One connection of the front, without a socket of its own."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from cluster.http.protocol import HttpProtocol


def test_closed_socket_has_no_unsent_bytes() -> None:
    """Seen when a server ended: the number of a closed socket is -1, which is no OSError."""
    sock = socket.socket()
    sock.close()
    protocol = HttpProtocol.__new__(HttpProtocol)
    protocol.transport = SimpleNamespace(get_extra_info=lambda name: sock)  # type: ignore[assignment]
    assert protocol._count_unsent() == 0
