"""Who has connected to a socket of ours and has not proven yet who he is.

Anybody who reaches a port may connect, as often as he likes. What he can take is bounded here, for
every socket that we open: so many connections, so much time. Where there is no room a newcomer
takes the place of the oldest, first of his own address, then of the address that has the most.
Whoever holds the token proves it in two round trips: he is among the newest until he has.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from actors.channels.neighbour import credentials
from contracts.clock import Clock, monotonic_s
from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

MAX_UNPROVEN: Final = 64  # per socket that we listen on
MAX_PER_ADDRESS: Final = 32
FIRST_BYTE_S: Final = 2.0  # a peer speaks as soon as it is asked
HANDSHAKE_S: Final = 5.0  # all of it
ACCEPT_RETRY_S: Final = 0.2  # after an accept that failed: no descriptors, no memory
_TELL_EVERY_S: Final = 10.0

Cut = Callable[[], None]


class _Waiting(NamedTuple):
    address: str
    cut: Cut


class Gate:
    """Of one listening socket. Used from any thread. name: the rank's."""

    def __init__(self, name: str, clock: Clock = monotonic_s) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}  # oldest first
        self._held: Counter[str] = Counter()
        self._next = 0
        self._told_s: dict[str, float] = {}
        self._cut_count = 0

    def enter(self, address: str, cut: Cut) -> int:
        """Lets a newcomer in; its number, for `leave`. `cut` ends its connection: called, on any
        thread, when another one needs its place."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            victim = self._victim(address)
            if victim is not None:
                self._free(victim.address)
                self._cut_count += 1
            self._waiting[number] = _Waiting(address, cut)
            self._held[address] += 1
        if victim is not None:
            victim.cut()
            self.tell(
                "strangers_cut",
                f"{self._cut_count} so far; the last came from {victim.address or 'a Unix socket'}",
            )
        return number

    def leave(self, number: int) -> bool:
        """It has proven itself, or is gone. False: it had been cut."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
            if waiting is None:
                return False
            self._free(waiting.address)
            return True

    @property
    def count(self) -> int:
        """How many are in it now."""
        return len(self._waiting)

    def tell(self, name: str, reason: str) -> None:
        """Logs what strangers bring about, at most every ten seconds."""
        now_s = self._clock()
        if now_s - self._told_s.get(name, -_TELL_EVERY_S) >= _TELL_EVERY_S:
            self._told_s[name] = now_s
            event(log, name, logging.WARNING, rank=self._name, reason=reason)

    def _free(self, address: str) -> None:
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]

    def _victim(self, address: str) -> _Waiting | None:
        """Takes out who must make room, if anybody must."""
        if self._held[address] >= MAX_PER_ADDRESS:
            whose = address
        elif len(self._waiting) >= MAX_UNPROVEN:
            whose = self._held.most_common(1)[0][0]
        else:
            return None
        number = next(n for n, waiting in self._waiting.items() if waiting.address == whose)
        return self._waiting.pop(number)


def address_of(sock: socket.socket) -> str:
    """Whom to count a connection for: the host, or the process behind a Unix socket. Raises
    OSError."""
    if sock.family == socket.AF_UNIX:
        return f"pid {credentials(sock)[0]}"
    return str(sock.getpeername()[0])


def shut_down(sock: socket.socket) -> None:
    """Ends what its owner waits for on it, who then closes it. Any thread."""
    with contextlib.suppress(OSError):  # it was gone already
        sock.shutdown(socket.SHUT_RDWR)
