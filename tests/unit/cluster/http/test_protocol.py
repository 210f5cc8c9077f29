"""The HTTP protocol without a socket."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from cluster.http.protocol import HttpProtocol


def test_closed_socket_has_no_unsent_bytes() -> None:
    """A closed socket has the descriptor -1."""
    sock = socket.socket()
    sock.close()
    protocol = HttpProtocol.__new__(HttpProtocol)
    protocol.transport = SimpleNamespace(get_extra_info=lambda name: sock)  # type: ignore[assignment]
    assert protocol._count_unsent() == 0
