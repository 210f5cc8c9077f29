"""Identity, state and kill of local processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from actors.channels.local_process import (
    LocalProcess,
    ProcessIdentity,
    find_process,
    is_alive,
    is_hung,
    kill_process,
)
from tests.support.process_identity import process_identity_of

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def test_process_is_killed_by_its_own_identity(child: subprocess.Popen[bytes]) -> None:
    assert kill_process(process_identity_of(child.pid))
    assert child.wait(10) == -signal.SIGKILL


def test_another_process_with_the_same_pid_is_not_killed(
    child: subprocess.Popen[bytes],
) -> None:
    assert not kill_process(process_identity_of(child.pid, later_ticks=1))
    assert child.poll() is None


def test_ended_process_and_remote_process_are_not_found(
    child: subprocess.Popen[bytes],
) -> None:
    there = process_identity_of(child.pid)
    assert is_alive(there)
    child.kill()
    child.wait(10)
    assert not kill_process(there)
    assert find_process(there) is None
    assert not is_alive(there)
    elsewhere = msgspec.msgpack.encode(ProcessIdentity("another machine", os.getpid(), 1, ""))
    assert not kill_process(elsewhere)
    assert find_process(elsewhere) is None
    assert not is_alive(elsewhere)
    for nonsense in (b"", b"\xc1", b"\x94\x01\x02\x03\x04"):
        assert not kill_process(nonsense)
        assert find_process(nonsense) is None
        assert not is_alive(nonsense)


def test_reused_pid_and_zombie_count_as_ended(
    child: subprocess.Popen[bytes],
) -> None:
    there = process_identity_of(child.pid)
    assert not is_alive(process_identity_of(child.pid, later_ticks=1))
    child.send_signal(signal.SIGSTOP)
    assert is_alive(there), "stopped is not ended"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(there)


def test_stopped_and_replaced_processes_are_not_running(
    child: subprocess.Popen[bytes],
) -> None:
    process = find_process(process_identity_of(child.pid))
    assert process is not None
    assert process.is_running
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not process.is_running
    child.kill()
    child.wait(10)
    assert not process.is_running
    process.close()


def test_process_in_another_network_namespace_is_not_local_and_can_be_killed(
    child: subprocess.Popen[bytes],
) -> None:
    """The link may be at fault, so a running process is no excuse."""
    there = msgspec.msgpack.decode(process_identity_of(child.pid), type=ProcessIdentity)
    there = msgspec.structs.replace(there, network="net:[1]")
    assert find_process(msgspec.msgpack.encode(there)) is None
    assert kill_process(msgspec.msgpack.encode(there))


def test_traced_process_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = LocalProcess(os.getpid())
    monkeypatch.setattr(process, "_fields", lambda: [b"t"])
    assert not is_hung(1.4, 1.5, process)
    assert is_hung(1.5, 1.5, process)
    process.close()
