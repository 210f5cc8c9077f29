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

from contracts.frames import BAD_FRAME

STARVED = 4  # times the limit of silence: what a process is given that may wait for a core
STOPPED = 1 / 3  # of it: what one is given that has been stopped
_ENDED = b"ZXx"
_HALTED = b"Tt" + _ENDED  # stopped, traced, ended
_STOPPED = b"T"  # by a signal. A profiler or debugger traces, and lets go soon
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """A process, as another one of the same machine can find it."""

    machine: str
    pid: int
    started: int  # in the kernel's ticks: a later process under this number has another
    network: str  # who has another is reached over a link, which may be cut


# Made here: where two threads make the first one of a type at once, msgspec crashes.
_decode = msgspec.msgpack.Decoder(Whereabouts).decode


class Neighbour:
    """Owns a descriptor, made while there are some: looking takes none. Any thread."""

    def __init__(self, pid: int) -> None:
        """Raises OSError."""
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def runs(self) -> bool:
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
    def started(self) -> int:
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


def is_hung(silent_s: float, silence_s: float, neighbour: Neighbour | None) -> bool:
    """Whether a peer that has been silent for so long has no excuse. neighbour: the peer, where it
    is a process of this machine."""
    if silent_s < silence_s:
        stopped_s = STOPPED * silence_s
        return silent_s >= stopped_s and neighbour is not None and neighbour.is_stopped
    return silent_s >= STARVED * silence_s or neighbour is None or not neighbour.runs


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user that made the other end of a Unix socket. Raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def behind(sock: socket.socket) -> Neighbour | None:
    """Who made the other end of a Unix socket; None if that is not known."""
    if sock.family != socket.AF_UNIX:
        return None
    pid, _ = credentials(sock)
    try:
        return Neighbour(pid) if pid > 0 else None  # 0: of another namespace
    except OSError:
        return None


def here() -> bytes:
    """This process, for `found`."""
    me = Neighbour(os.getpid())
    try:
        told = Whereabouts(_machine(), os.getpid(), me.started, _network())
        return msgspec.msgpack.encode(told)
    finally:
        me.close()


def found(whereabouts: bytes) -> Neighbour | None:
    """The process that said it is `here()`, if it is one of this machine and nothing is between it
    and us: behind another network, silence may be a link's, which looking at it would not show."""
    said = _of_this_machine(whereabouts)
    return _process(said) if said is not None and said.network == _network() else None


def lives(whereabouts: bytes) -> bool:
    """Whether the process that said it is `here()` has not ended, stopped or not. False, too, for
    one of another machine: it cannot be seen."""
    said = _of_this_machine(whereabouts)
    process = None if said is None else _process(said)
    if process is None:
        return False
    try:
        return not process.has_ended
    finally:
        process.close()


def _of_this_machine(whereabouts: bytes) -> Whereabouts | None:
    try:
        said: Whereabouts = _decode(whereabouts)
    except BAD_FRAME:
        return None
    return said if said.machine == _machine() else None


def _process(said: Whereabouts) -> Neighbour | None:
    try:
        process = Neighbour(said.pid)
    except OSError:
        return None
    if process.started == said.started:
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


def end(whereabouts: bytes) -> bool:
    """Kills the process that said it is `here()`, and no other that has its number now. False: it
    is gone, or on another machine. Raises OSError."""
    said = _of_this_machine(whereabouts)
    if said is None:
        return False
    try:
        handle = os.pidfd_open(said.pid)
    except ProcessLookupError:
        return False
    try:
        process = _process(said)  # looked at once the handle is: it is the same process
        if process is None:
            return False
        process.close()
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
