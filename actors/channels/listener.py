"""Accepts connections and lets each prove itself, without harm to the others or to the owner.

One thread accepts; every handshake runs on a short-lived thread of its own with a short deadline.
At most `MAX_HANDSHAKES` run at once: while all are taken, newcomers wait in the kernel's backlog.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from actors.channels import handshake
from actors.channels.handshake import Answer, Identity, Remote
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, HandshakeError

log = logging.getLogger(__name__)

MAX_HANDSHAKES: Final = 32
HANDSHAKE_S: Final = 5.0
_BACKLOG: Final = 128
_CREDENTIALS = struct.Struct("3i")

Accepted = Callable[[socket.socket, Remote], None]


def listen_unix() -> tuple[socket.socket, str]:
    """A listening Unix socket with a random abstract name, and its address.

    Abstract names live in the kernel: unlike a file they vanish with the process, however it ends.
    They have no file mode; `Listener` checks the user instead (SO_PEERCRED).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"tandem-{secrets.token_hex(12)}"
    sock.bind("\0" + name)
    sock.listen(_BACKLOG)
    return sock, f"unix:@{name}"


def listen_tcp(host: str) -> tuple[socket.socket, str]:
    """A listening TCP socket on a free port of `host`, and its address. Raises ChannelError."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ChannelError(f"cannot listen on {host}: {error}") from None
    return sock, f"tcp:{host}:{sock.getsockname()[1]}"


def dial(address: str, timeout_s: float) -> socket.socket:
    """A connection to an address as `listen_*` made it. Raises ChannelError."""
    scheme, _, rest = address.partition(":")
    try:
        if scheme == "unix" and rest.startswith("@"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                sock.connect("\0" + rest[1:])
            except OSError:
                sock.close()
                raise
            return sock
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    except (OSError, ValueError) as error:
        raise ChannelError(f"cannot connect to {address}: {error}") from None
    raise ChannelError(f"cannot connect to {address!r}: expected unix:@name or tcp:host:port")


class Listener:
    """Owns `sock`. `accepted` is called on a handshake's thread and takes over the connection."""

    def __init__(
        self, sock: socket.socket, me: Identity, *, answer: Answer, accepted: Accepted
    ) -> None:
        self._sock = sock
        self._me = me
        self._answer = answer
        self._accepted = accepted
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._live: dict[threading.Thread, socket.socket | None] = {}  # None: proven, handed over
        self._thread = threading.Thread(target=self._run, name=f"{me.name}-accept", daemon=True)
        sock.setblocking(False)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Stops accepting, cuts handshakes that are under way, ends all threads."""
        end_s = monotonic_s() + deadline_s
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            live = dict(self._live)
            for sock in live.values():
                if sock is not None:
                    _shutdown(sock)
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
            while not self._slots.acquire(timeout=0.05):
                if self._stopping.is_set():
                    return
            if not self._accept_one():
                self._slots.release()

    def _accept_one(self) -> bool:
        """Starts one handshake; False if there was nobody."""
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:  # woken to stop
            return False
        except OSError as error:  # gone again, or no descriptors left: do not spin on it
            log.warning("accept_failed", extra={"rank": self._me.name, "reason": str(error)})
            self._stopping.wait(0.05)
            return False
        thread = threading.Thread(
            target=self._greet, args=(sock,), name=f"{self._me.name}-handshake", daemon=True
        )
        with self._lock:
            if self._stopping.is_set():
                sock.close()
                return False
            self._live[thread] = sock
        thread.start()
        return True

    def _greet(self, sock: socket.socket) -> None:
        try:
            remote = self._prove(sock)
            with self._lock:
                welcome = remote is not None and not self._stopping.is_set()
                self._live[threading.current_thread()] = None
            if welcome and remote is not None:
                self._accepted(sock, remote)
            else:
                sock.close()
        finally:
            with self._lock:
                self._live.pop(threading.current_thread(), None)
            self._slots.release()

    def _prove(self, sock: socket.socket) -> Remote | None:
        try:
            _check_user(sock)
            remote = handshake.accept(sock, self._me, answer=self._answer, deadline_s=HANDSHAKE_S)
        except HandshakeError as error:
            log.warning("handshake_refused", extra={"rank": self._me.name, "reason": error.message})
            return None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return remote


def _check_user(sock: socket.socket) -> None:
    """Raises HandshakeError unless the process behind a Unix socket is ours or root's."""
    if sock.family != socket.AF_UNIX:
        return
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (os.getuid(), 0):
        raise HandshakeError(f"user {uid} is neither {os.getuid()} nor root")


def _shutdown(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was gone already
        sock.shutdown(socket.SHUT_RDWR)
