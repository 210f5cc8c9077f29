"""Processes of this machine: state, identity, and a safe kill.

A silent peer may be waiting for a core. A local process that is neither stopped nor gone gets
longer before it counts as hung; a stopped one, which no core would help, gets less.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
from contextlib import closing
from pathlib import Path

import msgspec

from contracts.messages import FRAME_ERRORS

STARVED_FACTOR = 4  # times heartbeat_timeout_s, for a process that may wait for a core
STOPPED_FACTOR = 1 / 3  # times heartbeat_timeout_s, for a stopped process
_ENDED = b"ZXx"
_HALTED = b"Tt" + _ENDED  # stopped, traced, ended
_EXITING = 0x4  # PF_EXITING
_STOPPED = b"T"  # by a signal; a profiler or debugger only traces
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process as another one of the same machine can find it."""

    machine: str
    pid: int
    start_ticks: int  # distinguishes processes that reuse a pid
    network: str  # network namespace


_decode = msgspec.msgpack.Decoder(ProcessIdentity).decode


class LocalProcess:
    """A process whose state is read through a descriptor opened once. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_running(self) -> bool:
        """True if it is neither stopped nor gone."""
        return self._state not in _HALTED

    @property
    def is_stopped(self) -> bool:
        """True if a signal such as SIGSTOP stopped it."""
        return self._state in _STOPPED

    @property
    def has_ended(self) -> bool:
        """True if it is gone or a zombie."""
        return self._state in _ENDED

    @property
    def is_ending(self) -> bool:
        """True from the begin of its exit, before the kernel frees any of its memory."""
        fields = self._fields()
        return not fields or bool(int(fields[6]) & _EXITING)

    @property
    def start_ticks(self) -> int:
        """Start time in kernel ticks; -1 if it is gone."""
        fields = self._fields()
        return int(fields[19]) if fields else -1

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def _state(self) -> bytes:
        """State as the kernel names it; dead if it is gone."""
        fields = self._fields()
        return fields[0] if fields else b"X"

    def _fields(self) -> list[bytes]:
        """Return the fields of its stat from the state on; empty once it is gone."""
        try:
            stat = os.pread(self._fd, 4096, 0)
        except OSError:
            return []
        return stat[stat.rindex(b")") + 2 :].split()


def is_hung(
    silent_s: float, heartbeat_timeout_s: float, local_process: LocalProcess | None
) -> bool:
    """Return whether a peer is silent for too long. local_process: the peer, if it is local."""
    if silent_s < heartbeat_timeout_s:
        stopped_s = STOPPED_FACTOR * heartbeat_timeout_s
        return silent_s >= stopped_s and local_process is not None and local_process.is_stopped
    return (
        silent_s >= STARVED_FACTOR * heartbeat_timeout_s
        or local_process is None
        or not local_process.is_running
    )


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process that opened the other end. Raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_process(sock: socket.socket) -> LocalProcess | None:
    """Return the process at the other end of a Unix socket, or None if unknown."""
    if sock.family != socket.AF_UNIX:
        return None
    pid, _ = peer_credentials(sock)
    try:
        return LocalProcess(pid) if pid > 0 else None  # 0: another pid namespace
    except OSError:
        return None


def own_identity() -> bytes:
    """Return this process's identity for `find_process`."""
    with closing(LocalProcess(os.getpid())) as me:
        identity = ProcessIdentity(_machine(), os.getpid(), me.start_ticks, _network())
    return msgspec.msgpack.encode(identity)


def find_process(process_identity: bytes) -> LocalProcess | None:
    """Return the process of that `own_identity()` if no network link lies between it and us."""
    identity = _decode_local(process_identity)
    return None if identity is None or identity.network != _network() else _open_process(identity)


def is_alive(process_identity: bytes) -> bool:
    """Return whether the process of that `own_identity()` runs or is stopped on this machine."""
    identity = _decode_local(process_identity)
    process = None if identity is None else _open_process(identity)
    if process is None:
        return False
    with closing(process):
        return not process.has_ended


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
    """Return a text that is equal in processes that share process ids."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


@functools.cache
def _network() -> str:
    return os.readlink("/proc/self/ns/net")


@functools.cache
def boot_id() -> str:
    """Return a text that is equal in processes that share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def kill_process(process_identity: bytes) -> bool:
    """Kill the process of that `own_identity()`; False if it is not live here. Raises OSError."""
    identity = _decode_local(process_identity)
    if identity is None:
        return False
    try:
        handle = os.pidfd_open(identity.pid)
        try:
            process = _open_process(identity)  # after opening the handle, so both are one process
            if process is None:
                return False
            process.close()
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        finally:
            os.close(handle)
    except ProcessLookupError:
        return False
