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
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

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


class PendingHandshakes:
    """Connections of one listening socket that have not authenticated. Thread-safe.

    name: the rank's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}  # oldest first
        self._logged_s: dict[str, float] = {}
        self._evicted = 0

    def enter(self, sock: socket.socket, address: str) -> None:
        """Add a connection; shut down the one that must make room, if any."""
        with self._lock:
            victim = self._victim(address)
            evicted = None if victim is None else self._addresses.pop(victim)
            self._addresses[sock] = address
        if victim is not None:
            shut_down(victim)
            self._evicted += 1
            last = f"{self._evicted} so far; the last came from {evicted or 'a Unix socket'}"
            self.log_limited("handshakes_evicted", last)

    def leave(self, sock: socket.socket) -> bool:
        """Remove a connection. Returns False if it has been shut down."""
        with self._lock:
            return self._addresses.pop(sock, None) is not None

    def close(self) -> None:
        """Shut down all connections."""
        with self._lock:
            pending, self._addresses = list(self._addresses), {}
        for sock in pending:
            shut_down(sock)

    def log_limited(self, name: str, reason: str) -> None:
        """Log an event that strangers cause, at most every ten seconds."""
        now_s = monotonic_s()
        if now_s - self._logged_s.get(name, -_LOG_PERIOD_S) >= _LOG_PERIOD_S:
            self._logged_s[name] = now_s
            event(log, name, logging.WARNING, rank=self._name, reason=reason)

    def _victim(self, address: str) -> socket.socket | None:
        """Return the oldest connection of the address that must make room, if any."""
        counts = Counter(self._addresses.values())
        if counts[address] >= MAX_PER_ADDRESS:
            fullest = address
        elif len(self._addresses) >= MAX_UNPROVEN:
            fullest = counts.most_common(1)[0][0]
        else:
            return None
        return next(sock for sock, other in self._addresses.items() if other == fullest)


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
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # signals the end of a handshake
        self._stopping = threading.Event()
        self._live: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._run, name=f"{me.name}-accept", daemon=True)
        sock.setblocking(True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Stop accepting, end handshakes under way, end all threads."""
        end_s = monotonic_s() + deadline_s
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self._ended.notify_all()
            live = tuple(self._live)
        self._pending.close()
        shut_down(self._sock)  # ends `accept`
        for thread in (self._thread, *live):
            thread.join(max(end_s - monotonic_s(), 0.0))
        self._sock.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._accept_one()

    def _accept_one(self) -> None:
        """Wait for a connection and start its handshake."""
        try:
            sock, _ = self._sock.accept()
        except OSError as error:  # out of descriptors or memory: do not spin
            if not self._stopping.is_set():
                self._pending.log_limited("accept_failed", str(error))
                self._stopping.wait(ACCEPT_RETRY_S)
            return
        try:
            self._pending.enter(sock, address_of(sock))
        except OSError:  # disconnected
            sock.close()
            return
        if not self._start(sock):
            self._pending.leave(sock)
            sock.close()

    def _start(self, sock: socket.socket) -> bool:
        thread = threading.Thread(
            target=self._handle, args=(sock,), name=f"{self._me.name}-handshake", daemon=True
        )
        with self._lock:
            # Evicted handshakes are about to end: their sockets have been shut down.
            self._ended.wait_for(
                lambda: len(self._live) < 2 * MAX_UNPROVEN or self._stopping.is_set()
            )
            if self._stopping.is_set():
                return False
            self._live.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            self._pending.log_limited("accept_failed", str(error))
            with self._lock:
                self._live.remove(thread)
            self._stopping.wait(ACCEPT_RETRY_S)
            return False
        return True

    def _handle(self, sock: socket.socket) -> None:
        try:
            remote = self._authenticate(sock)
            stays = self._pending.leave(sock) and not self._stopping.is_set()
            if stays and remote is not None:
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
                self._live.discard(threading.current_thread())
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
