"""Limits on connections that have not authenticated yet.

Any host that reaches a port may connect as often as it likes. Each listening socket bounds the
number and duration of such connections. When full, a newcomer evicts the oldest connection of its
own address, or of the address that has the most. A peer with the token needs two round trips, so it
is among the newest until it has authenticated.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from actors.channels.local_process import peer_credentials
from contracts.clock import monotonic_s
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

MAX_UNPROVEN: Final = 64  # per socket that we listen on
MAX_PER_ADDRESS: Final = 32
FIRST_BYTE_S: Final = 2.0  # limit for a peer's first byte
HANDSHAKE_S: Final = 5.0  # limit for the whole handshake
ACCEPT_RETRY_S: Final = 0.2  # after a failed accept: out of descriptors or memory
_LOG_PERIOD_S: Final = 10.0

CloseConnection = Callable[[], None]


class _Pending(NamedTuple):
    address: str
    close_connection: CloseConnection


class PendingHandshakes:
    """Pending connections of one listening socket. Thread-safe. name: the rank's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: dict[int, _Pending] = {}  # oldest first
        self._per_address: Counter[str] = Counter()
        self._next = 0
        self._logged_s: dict[str, float] = {}
        self._evicted = 0

    def enter(self, address: str, close_connection: CloseConnection) -> int:
        """Add a connection; return its number. close_connection: evicts it, on any thread."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            victim = self._evict(address)
            if victim is not None:
                self._free(victim.address)
                self._evicted += 1
            self._waiting[number] = _Pending(address, close_connection)
            self._per_address[address] += 1
        if victim is not None:
            victim.close_connection()
            self.log_limited(
                "handshakes_evicted",
                f"{self._evicted} so far; the last came from {victim.address or 'a Unix socket'}",
            )
        return number

    def leave(self, number: int) -> bool:
        """Remove a connection. Returns False if it had been evicted."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
            if waiting is None:
                return False
            self._free(waiting.address)
            return True

    @property
    def count(self) -> int:
        """Number of pending connections."""
        return len(self._waiting)

    def log_limited(self, name: str, reason: str) -> None:
        """Log an event that strangers cause, at most every ten seconds."""
        now_s = monotonic_s()
        if now_s - self._logged_s.get(name, -_LOG_PERIOD_S) >= _LOG_PERIOD_S:
            self._logged_s[name] = now_s
            event(log, name, logging.WARNING, rank=self._name, reason=reason)

    def _free(self, address: str) -> None:
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]

    def _evict(self, address: str) -> _Pending | None:
        """Remove and return the connection that must make room, if any."""
        if self._per_address[address] >= MAX_PER_ADDRESS:
            fullest = address
        elif len(self._waiting) >= MAX_UNPROVEN:
            fullest = self._per_address.most_common(1)[0][0]
        else:
            return None
        number = next(n for n, waiting in self._waiting.items() if waiting.address == fullest)
        return self._waiting.pop(number)


def address_of(sock: socket.socket) -> str:
    """Return the host, or the process behind a Unix socket. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        return f"pid {peer_credentials(sock)[0]}"
    return str(sock.getpeername()[0])


def shut_down(sock: socket.socket) -> None:
    """End what the owner of `sock` waits for; the owner closes it. Thread-safe."""
    with contextlib.suppress(OSError):  # already disconnected
        sock.shutdown(socket.SHUT_RDWR)
