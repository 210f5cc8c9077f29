"""Shared memory between CPU processes of one node. Linux only (memfd, abstract Unix sockets)."""

from __future__ import annotations

import socket

from actors.channels.endpoint import BaseEndpoint
from actors.channels.link import Joint, Link
from actors.channels.listener import listen_unix
from actors.channels.ring_link import RingLink


class ShmEndpoint(BaseEndpoint):
    """`host` of `listen` is not used: the address is a Unix socket's."""

    backend = "shm"

    def _listen(self, host: str) -> tuple[socket.socket, str]:
        return listen_unix()

    def _join(self, joint: Joint) -> Link:
        return RingLink(joint, self.config, self.clock)
