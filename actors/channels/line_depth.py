"""How many bytes of a TCP connection nobody can overtake: those that the kernel holds, and a piece.

Left alone, it holds what its congestion window allows, which on a link without losses grows far
beyond what keeps the line busy: 1 MB at 1 Gbit/s, 8 ms. What the line needs is what it delivers in
a round trip; the kernel measures both (`struct tcp_info`). The bound is twice that, so that a line
that turns out to be faster is found out, and twice HELD_S on top, for the sender's own pauses.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path
from typing import Final

HELD_S: Final = 0.001
LEAST_BYTES: Final = 64 << 10
FIRST_BYTES: Final = 256 << 10  # of a piece, while nothing is known
EVERY_BYTES: Final = 2 << 20  # of what is sent, between two looks
_FIELDS: Final = struct.Struct("<148x I 8x Q")  # tcpi_min_rtt in us, tcpi_delivery_rate in bytes/s
_SO_BUF_LOCK: Final = 72  # Linux 5.14: 0 lets the kernel choose again


class LineDepth:
    """Of one connection; one thread's. piece_bytes: what takes HELD_S to send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._most_bytes = _most_bytes()
        self._sent_bytes = 0
        self.piece_bytes = FIRST_BYTES

    def sent(self, num_bytes: int) -> None:
        """`num_bytes` were handed to the kernel, by somebody who had more to send."""
        self._sent_bytes += num_bytes
        if self._sent_bytes >= EVERY_BYTES:
            self._sent_bytes = 0
            with contextlib.suppress(OSError):  # an old kernel, or a connection that has ended
                self._fit()

    def _fit(self) -> None:
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
        if len(info) < _FIELDS.size:
            return
        min_rtt_us, bytes_per_s = _FIELDS.unpack(info)
        self.piece_bytes = max(LEAST_BYTES, int(bytes_per_s * HELD_S))
        num_bytes = max(LEAST_BYTES, int(bytes_per_s * (1e-6 * min_rtt_us + HELD_S)))
        if num_bytes > self._most_bytes:  # more than we may ask for, but not than it may take
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)  # it doubles it


def _most_bytes() -> int:
    """What SO_SNDBUF is cut to."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except OSError:
        return LEAST_BYTES
