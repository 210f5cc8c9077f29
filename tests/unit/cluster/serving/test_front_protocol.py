"""One connection of the front, without a socket of its own."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from cluster.serving.front_protocol import FrontProtocol


def test_a_connection_whose_socket_is_closed_owes_its_client_nothing() -> None:
    """Seen when a server ended: the number of a closed socket is -1, which is no OSError."""
    sock = socket.socket()
    sock.close()
    protocol = FrontProtocol.__new__(FrontProtocol)
    protocol.transport = SimpleNamespace(get_extra_info=lambda name: sock)  # type: ignore[assignment]
    assert protocol._count_unsent() == 0
