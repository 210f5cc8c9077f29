"""Sockets that listen and dial, and a listener that authenticates each connection.

One thread accepts; every handshake runs on its own short-lived thread with a deadline, so that none
delays the others or the owner. `PendingHandshakes` bounds their number.

Any host that reaches a port may connect as often as it likes. Each listening socket bounds the
number and duration of connections that have not authenticated yet. When full, a newcomer evicts the
oldest connection of its own address, or of the address that has the most. A peer with the token
needs two round trips, so it is among the newest until it has authenticated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from actors.channels import handshake
from actors.channels.handshake import AcceptHandler, Identity, Remote
from actors.channels.local_process import peer_credentials
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandshakeError
from contracts.logs import event

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


log = logging.getLogger(f"tandem.{__name__}")

ADDRESS_SEPARATOR: Final = ","  # between the addresses of one listener
_BACKLOG: Final = 128
_BACKLOG_RETRY_S: Final = 0.005

AcceptedHandler = Callable[[socket.socket, Remote], None]


def listen_unix() -> tuple[socket.socket, str]:
    """Return a listening Unix socket with a random abstract name, and its address.

    The name vanishes with the process, however it ends. It has no file mode, so `HandshakeListener`
    checks the user (SO_PEERCRED).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"tandem-{secrets.token_hex(12)}"
    sock.bind("\0" + name)
    sock.listen(_BACKLOG)
    return sock, f"unix:@{name}"


def listen_tcp(host: str) -> tuple[socket.socket, str]:
    """Return a TCP socket listening on a free port, and its address. Raises ChannelError."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ChannelError(f"cannot listen on {host}: {error}") from None
    return sock, f"tcp:{host}:{sock.getsockname()[1]}"


def dial(address: str, timeout_s: float) -> socket.socket:
    """Connect to the first of several addresses that answers. Raises ChannelError."""
    end_s = monotonic_s() + timeout_s
    *others, last = address.split(ADDRESS_SEPARATOR)
    for other in others:
        try:
            return _dial(other, timeout_s)
        except ChannelError:
            timeout_s = max(end_s - monotonic_s(), 1e-3)
    return _dial(last, timeout_s)


def _dial(address: str, timeout_s: float) -> socket.socket:
    scheme, _, rest = address.partition(":")
    try:
        if scheme == "unix" and rest.startswith("@"):
            return _dial_unix("\0" + rest[1:], timeout_s)
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    except (OSError, ValueError) as error:
        raise ChannelError(f"cannot connect to {address}: {error}") from None
    raise ChannelError(f"cannot connect to {address!r}: expected unix:@name or tcp:host:port")


def _dial_unix(name: str, timeout_s: float) -> socket.socket:
    end_s = monotonic_s() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        while True:
            try:
                sock.connect(name)
                return sock
            except BlockingIOError:  # the listener's backlog is full
                if monotonic_s() >= end_s:
                    raise
                time.sleep(_BACKLOG_RETRY_S)
    except OSError:
        sock.close()
        raise


class HandshakeListener:
    """Accepts on `sock`. `accepted`, on a handshake thread, owns the connection."""

    def __init__(
        self, sock: socket.socket, me: Identity, *, answer: AcceptHandler, accepted: AcceptedHandler
    ) -> None:
        self._sock = sock
        self._me = me
        self._answer = answer
        self._on_accepted = accepted
        self._pending = PendingHandshakes(me.name)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # signals the end of a handshake
        self._stopping = threading.Event()
        self._live: dict[threading.Thread, socket.socket | None] = {}  # None: handed over
        self._thread = threading.Thread(target=self._run, name=f"{me.name}-accept", daemon=True)
        sock.setblocking(False)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Stop accepting, end handshakes under way, end all threads."""
        end_s = monotonic_s() + deadline_s
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self._ended.notify_all()
            live = dict(self._live)
            for sock in live.values():
                if sock is not None:
                    shut_down(sock)
        os.eventfd_write(self._stop_fd, 1)
        for thread in (self._thread, *live):
            thread.join(max(end_s - monotonic_s(), 0.0))
        self._sock.close()
        os.close(self._stop_fd)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._stop_fd, select.POLLIN)
        while not self._stopping.is_set():
            poller.poll()
            self._accept_one()

    def _accept_one(self) -> None:
        """Start one handshake, if a connection is waiting."""
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:  # woken to stop, or the peer disconnected
            return
        except OSError as error:  # out of descriptors or memory: do not spin
            self._pending.log_limited("accept_failed", str(error))
            self._stopping.wait(ACCEPT_RETRY_S)
            return
        try:
            address = address_of(sock)
            number = self._pending.enter(address, partial(shut_down, sock))
        except OSError:  # disconnected
            sock.close()
            return
        if not self._start(sock, number):
            self._pending.leave(number)
            sock.close()

    def _start(self, sock: socket.socket, number: int) -> bool:
        thread = threading.Thread(
            target=self._handle, args=(sock, number), name=f"{self._me.name}-handshake", daemon=True
        )
        with self._lock:
            # Evicted handshakes are about to end: their sockets have been shut down.
            self._ended.wait_for(
                lambda: len(self._live) < 2 * MAX_UNPROVEN or self._stopping.is_set()
            )
            if self._stopping.is_set():
                return False
            self._live[thread] = sock
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            self._pending.log_limited("accept_failed", str(error))
            with self._lock:
                del self._live[thread]
            self._stopping.wait(ACCEPT_RETRY_S)
            return False
        return True

    def _handle(self, sock: socket.socket, number: int) -> None:
        try:
            remote = self._authenticate(sock)
            stays = self._pending.leave(number)
            with self._lock:
                welcome = stays and not self._stopping.is_set()
                self._live[threading.current_thread()] = None
            if welcome and remote is not None:
                self._on_accepted(sock, remote)
            else:
                sock.close()
        except BaseException as error:  # one connection must not end the listener
            sock.close()
            if not isinstance(error, ChannelError | OSError):
                raise
            event(log, "join_failed", logging.WARNING, rank=self._me.name, reason=error)
        finally:
            with self._lock:
                self._live.pop(threading.current_thread(), None)
                self._ended.notify_all()

    def _authenticate(self, sock: socket.socket) -> Remote | None:
        try:
            _check_user(sock)
            remote = handshake.accept(
                sock,
                self._me,
                answer=self._answer,
                deadline_s=HANDSHAKE_S,
                first_byte_s=FIRST_BYTE_S,
            )
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (HandshakeError, OSError) as error:
            self._pending.log_limited("handshake_refused", str(error))
            return None
        return remote


def _check_user(sock: socket.socket) -> None:
    """Raise HandshakeError unless the process behind a Unix socket is ours or root's."""
    if sock.family != socket.AF_UNIX:
        return
    _, uid = peer_credentials(sock)
    if uid not in (os.getuid(), 0):
        raise HandshakeError(f"user {uid} is neither {os.getuid()} nor root")
