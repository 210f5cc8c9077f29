"""A process of this machine is told from one that has its number later (FINDINGS B16)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from actors.channels.neighbour import (
    STARVED,
    STOPPED,
    Neighbour,
    Whereabouts,
    behind,
    end,
    found,
    is_hung,
    lives,
)
from tests.support.whereabouts import whereabouts_of

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def test_a_process_is_killed_by_what_it_said_of_itself(child: subprocess.Popen[bytes]) -> None:
    assert end(whereabouts_of(child.pid))
    assert child.wait(10) == -signal.SIGKILL


def test_another_process_under_the_same_number_is_left_alone(
    child: subprocess.Popen[bytes],
) -> None:
    """FINDINGS B16: a worker's number may be somebody else's by the time it is killed."""
    assert not end(whereabouts_of(child.pid, later_ticks=1))
    assert child.poll() is None


def test_a_process_that_is_gone_and_one_elsewhere_are_nobody(
    child: subprocess.Popen[bytes],
) -> None:
    there = whereabouts_of(child.pid)
    assert lives(there)
    child.kill()
    child.wait(10)
    assert not end(there)
    assert found(there) is None
    assert not lives(there)
    elsewhere = msgspec.msgpack.encode(Whereabouts("another machine", os.getpid(), 1, ""))
    assert not end(elsewhere)
    assert found(elsewhere) is None
    assert not lives(elsewhere)
    for nonsense in (b"", b"\xc1", b"\x94\x01\x02\x03\x04"):
        assert not end(nonsense)
        assert found(nonsense) is None
        assert not lives(nonsense)


def test_whose_number_another_process_has_now_has_ended_and_so_has_one_that_nobody_waits_for(
    child: subprocess.Popen[bytes],
) -> None:
    there = whereabouts_of(child.pid)
    assert not lives(whereabouts_of(child.pid, later_ticks=1))
    child.send_signal(signal.SIGSTOP)
    assert lives(there), "stopped is not ended"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not lives(there)


def test_one_that_is_stopped_does_not_run_and_one_that_was_replaced_neither(
    child: subprocess.Popen[bytes],
) -> None:
    process = found(whereabouts_of(child.pid))
    assert process is not None
    assert process.runs
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not process.runs
    child.kill()
    child.wait(10)
    assert not process.runs
    process.close()


def test_one_behind_another_network_is_no_neighbour_and_can_be_ended(
    child: subprocess.Popen[bytes],
) -> None:
    """Its silence may be a link's, and that it runs does not excuse it."""
    there = msgspec.msgpack.decode(whereabouts_of(child.pid), type=Whereabouts)
    there = msgspec.structs.replace(there, network="net:[1]")
    assert found(msgspec.msgpack.encode(there)) is None
    assert end(msgspec.msgpack.encode(there))


def test_one_that_is_stopped_is_given_less(child: subprocess.Popen[bytes]) -> None:
    process = found(whereabouts_of(child.pid))
    assert process is not None
    assert not is_hung(1.4, 1.5, process)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not is_hung(STOPPED * 1.5 - 0.1, 1.5, process)
    assert is_hung(STOPPED * 1.5, 1.5, process)
    child.send_signal(signal.SIGCONT)
    os.waitpid(child.pid, os.WCONTINUED)
    assert not is_hung(1.4, 1.5, process)
    process.close()


def test_one_that_a_profiler_holds_for_a_moment_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Neighbour(os.getpid())
    monkeypatch.setattr(process, "_fields", lambda: [b"t"])
    assert not is_hung(1.4, 1.5, process)
    assert is_hung(1.5, 1.5, process)
    process.close()


def test_silence_is_excused_for_a_process_that_runs_and_for_no_other() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = behind(here)
        assert process is not None
        assert not is_hung(1.0, 1.5, None)
        assert is_hung(1.5, 1.5, None)
        assert not is_hung(STARVED * 1.5 - 0.1, 1.5, process)
        assert is_hung(STARVED * 1.5, 1.5, process)
        process.close()
        assert is_hung(1.5, 1.5, process)
