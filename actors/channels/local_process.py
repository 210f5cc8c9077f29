"""Another process of this machine: whether it runs, told from one that has its number later.

A peer that is silent may wait for a core. Where it is a process of this machine we can look: one
that is neither stopped nor gone is given longer before it counts as hung, and one that is stopped,
which no core would help, less.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
from pathlib import Path

import msgspec

from contracts.frames import FRAME_ERRORS

STARVED_FACTOR = 4  # times the limit of silence: what a process is given that may wait for a core
STOPPED_FACTOR = 1 / 3  # of it: what one is given that has been stopped
_ENDED = b"ZXx"
_HALTED = b"Tt" + _ENDED  # stopped, traced, ended
_STOPPED = b"T"  # by a signal. A profiler or debugger traces, and lets go soon
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process, as another one of the same machine can find it."""

    machine: str
    pid: int
    start_ticks: int  # in the kernel's ticks: a later process under this number has another
    network: str  # who has another is reached over a link, which may be cut


# Made here: where two threads make the first one of a type at once, msgspec crashes.
_decode = msgspec.msgpack.Decoder(ProcessIdentity).decode


class LocalProcess:
    """Owns a descriptor, made while there are some: looking takes none. Any thread."""

    def __init__(self, pid: int) -> None:
        """Raises OSError."""
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_running(self) -> bool:
        """Neither stopped nor gone."""
        fields = self._fields()
        return bool(fields) and fields[0] not in _HALTED

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or its like."""
        fields = self._fields()
        return bool(fields) and fields[0] in _STOPPED

    @property
    def has_ended(self) -> bool:
        """Gone, or not yet waited for."""
        fields = self._fields()
        return not fields or fields[0] in _ENDED

    @property
    def start_ticks(self) -> int:
        """-1: it is gone."""
        fields = self._fields()
        return int(fields[19]) if fields else -1

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fields(self) -> list[bytes]:
        """Of its stat, from its state on; none once it is gone."""
        try:
            stat = os.pread(self._fd, 4096, 0)
        except OSError:
            return []
        return stat[stat.rindex(b")") + 2 :].split()


def is_hung(
    silent_s: float, heartbeat_timeout_s: float, local_process: LocalProcess | None
) -> bool:
    """Whether a peer that has been silent for so long has no excuse. neighbour: the peer, where it
    is a process of this machine."""
    if silent_s < heartbeat_timeout_s:
        stopped_s = STOPPED_FACTOR * heartbeat_timeout_s
        return silent_s >= stopped_s and local_process is not None and local_process.is_stopped
    return (
        silent_s >= STARVED_FACTOR * heartbeat_timeout_s
        or local_process is None
        or not local_process.is_running
    )


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user that made the other end of a Unix socket. Raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_process(sock: socket.socket) -> LocalProcess | None:
    """Who made the other end of a Unix socket; None if that is not known."""
    if sock.family != socket.AF_UNIX:
        return None
    pid, _ = peer_credentials(sock)
    try:
        return LocalProcess(pid) if pid > 0 else None  # 0: of another namespace
    except OSError:
        return None


def own_identity() -> bytes:
    """This process, for `find_process`."""
    me = LocalProcess(os.getpid())
    try:
        identity = ProcessIdentity(_machine(), os.getpid(), me.start_ticks, _network())
        return msgspec.msgpack.encode(identity)
    finally:
        me.close()


def find_process(process_identity: bytes) -> LocalProcess | None:
    """The process that said it is `own_identity()`, if it is one of this machine and nothing is
    between it
    and us: behind another network, silence may be a link's, which looking at it would not show."""
    identity = _decode_local(process_identity)
    return (
        _open_process(identity) if identity is not None and identity.network == _network() else None
    )


def is_alive(process_identity: bytes) -> bool:
    """Whether the process that said it is `own_identity()` has not ended, stopped or not. False,
    too, for one of another machine: it cannot be seen."""
    identity = _decode_local(process_identity)
    process = None if identity is None else _open_process(identity)
    if process is None:
        return False
    try:
        return not process.has_ended
    finally:
        process.close()


def _decode_local(process_identity: bytes) -> ProcessIdentity | None:
    try:
        identity: ProcessIdentity = _decode(process_identity)
    except FRAME_ERRORS:
        return None
    return identity if identity.machine == _machine() else None


def _open_process(identity: ProcessIdentity) -> LocalProcess | None:
    try:
        process = LocalProcess(identity.pid)
    except OSError:
        return None
    if process.start_ticks == identity.start_ticks:
        return process
    process.close()
    return None


@functools.cache
def _machine() -> str:
    """Equal in processes that know each other by the same numbers."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


@functools.cache
def _network() -> str:
    return os.readlink("/proc/self/ns/net")


@functools.cache
def boot_id() -> str:
    """Equal in processes that share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def kill_process(process_identity: bytes) -> bool:
    """Kills the process that said it is `own_identity()`, and no other that has its number now.
    False: it is gone, or on another machine. Raises OSError."""
    identity = _decode_local(process_identity)
    if identity is None:
        return False
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        process = _open_process(identity)  # looked at once the handle is: it is the same process
        if process is None:
            return False
        process.close()
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
