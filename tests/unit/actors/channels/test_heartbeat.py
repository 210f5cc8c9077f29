"""Silence, judged with a manual clock, and frames on a full socket."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from actors.channels.heartbeat import (
    MAX_CHECK_S,
    EventLoopWatchdog,
    HeartbeatMonitor,
    HeartbeatThread,
    LoopWatchdog,
)
from actors.channels.link import FrameSocket
from actors.channels.local_process import (
    STOPPED_FACTOR,
    LocalProcess,
    ProcessIdentity,
    find_process,
    is_alive,
    is_hung,
    kill_process,
)
from contracts.config import ChannelConfig
from contracts.errors import PeerDeadError, PeerError, PeerHungError
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.manual_clock import ManualClock
from tests.support.process_identity import process_identity_of

CONFIG = ChannelConfig(
    backend="tcp",
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.5,
    connect_timeout_s=5.0,
    step_timeout_s=6.0,
)


DIAL = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX)
for _ in range(200):
    try:
        sock.connect(sys.argv[1])
        break
    except OSError:
        time.sleep(0.05)
time.sleep(60)
"""


class FakeLink:
    def __init__(self, sock: socket.socket) -> None:
        self.peer = "expert-3"
        self.monitor = HeartbeatMonitor(sock, self.peer, 0.0)
        self.blocked_since_s: float | None = None

    def flush(self) -> None:
        """Nothing is buffered."""


class Ward:
    """One link under a HeartbeatThread that is not started; `tick` is called by hand."""

    def __init__(self, ends: tuple[socket.socket, socket.socket]) -> None:
        self.other, sock = ends
        self.clock = ManualClock()
        self.link = FakeLink(sock)
        self.lost: list[PeerError] = []
        self.loop = LoopWatchdog("attention-0", CONFIG.step_timeout_s, self.clock)
        self.heartbeat = HeartbeatThread(
            "attention-0", CONFIG, self.clock, lambda _, error: self.lost.append(error), self.loop
        )
        self.heartbeat._links.append(self.link)  # type: ignore[arg-type]

    def tick(self, seconds: float, *, stopped_s: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.heartbeat.tick(stopped_s)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two TCP ends, without a known local process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        return dialled, server.accept()[0]


@contextmanager
def warded(ends: tuple[socket.socket, socket.socket]) -> Iterator[Ward]:
    ward = Ward(ends)
    yield ward
    ward.other.close()
    ward.link.monitor.close()


@pytest.fixture
def ward() -> Iterator[Ward]:
    with warded(tcp_pair()) as ward:
        yield ward


def test_silent_peer_is_reported_hung_once(ward: Ward) -> None:
    ward.tick(1.4)
    assert not ward.lost
    ward.tick(0.2)
    ward.tick(9.0)
    (error,) = ward.lost
    assert isinstance(error, PeerHungError)
    assert error.peer == "expert-3"
    assert "1.6 s" in str(error)


def test_running_local_peer_is_hung_after_four_timeouts() -> None:
    with warded(socket.socketpair()) as ward:
        ward.tick(4 * CONFIG.heartbeat_timeout_s - 0.1)
        assert not ward.lost
        ward.tick(0.2)
        assert "6.1 s" in str(ward.lost[0])


def test_stopped_local_peer_is_hung_after_a_third_of_the_timeout(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with (
        socket.socket(socket.AF_UNIX) as server,
        subprocess.Popen([sys.executable, "-c", DIAL, path]) as peer,
    ):
        server.bind(path)
        server.listen()
        with warded((socket.socket(), server.accept()[0])) as ward:
            peer.send_signal(signal.SIGSTOP)
            process = ward.link.monitor.local_process
            assert process is not None
            while process.is_running:  # the signal is on its way
                time.sleep(0.01)
            ward.clock.advance(STOPPED_FACTOR * CONFIG.heartbeat_timeout_s - 0.1)
            assert ward.heartbeat.tick(0.0) == pytest.approx(0.1)
            assert not ward.lost
            ward.tick(0.1)
            assert isinstance(ward.lost[0], PeerHungError)
        peer.kill()


def test_heartbeats_stop_while_the_loop_is_stalled(ward: Ward) -> None:
    ward.loop.record_progress()
    for _ in range(round(CONFIG.step_timeout_s / CONFIG.heartbeat_interval_s)):
        ward.other.send(b"\x01")
        ward.tick(CONFIG.heartbeat_interval_s)
    assert ward.other.recv(4096)
    ward.tick(CONFIG.heartbeat_interval_s)
    with pytest.raises(BlockingIOError):
        ward.other.recv(1, socket.MSG_DONTWAIT)
    ward.loop.record_progress()
    ward.tick(CONFIG.heartbeat_interval_s)
    assert ward.other.recv(64) == b"\x01"
    assert not ward.lost


def test_time_in_which_this_process_was_stopped_is_not_silence(ward: Ward) -> None:
    ward.tick(60.0, stopped_s=59.8)
    assert not ward.lost
    ward.tick(1.2)
    assert not ward.lost
    ward.tick(0.2)
    assert isinstance(ward.lost[0], PeerHungError)


def test_closed_peer_is_dead_not_hung(ward: Ward) -> None:
    ward.other.close()
    ward.tick(0.2)
    assert not ward.lost  # its data socket may still hold packets, and says the same in time
    ward.tick(1.5)
    assert isinstance(ward.lost[0], PeerDeadError)


@pytest.fixture
def links() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    a, b = socket.socketpair()
    clock = ManualClock()
    pair = FrameSocket(a, "b", clock), FrameSocket(b, "a", clock)
    yield pair
    for link in pair:
        link.close()


def test_buffered_descriptors_arrive_with_their_frames(
    links: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = links
    for number in range(500):
        left.send(b"x" * 3000)
        if number % 100 == 0:
            read_end, write_end = os.pipe()
            os.write(write_end, str(number).encode())
            left.send(b"pipe", read_end)
            os.close(read_end)
            os.close(write_end)
    received: list[bytes] = []
    contents = []
    while len(received) < 505:
        for frame in right.receive():
            received.append(frame)
            if frame == b"pipe":
                fd = right.take_fd()
                contents.append(os.read(fd, 16))
                os.close(fd)
        left.flush()
    assert contents == [b"0", b"100", b"200", b"300", b"400"]
    with pytest.raises(PeerError, match="without its file descriptor"):
        right.take_fd()


def test_unclaimed_descriptors_are_closed(links: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = links
    read_end, write_end = os.pipe()
    for _ in range(3):
        left.send(b"pipe", read_end)
    while right.receive() != []:
        pass
    os.close(read_end)
    os.close(write_end)


def test_frame_above_the_limit_is_an_error(links: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = links
    left.sock.send(b"\xff\xff\xff\xff rest")
    with pytest.raises(PeerError, match="frame of 4294967295 bytes"):
        right.receive()


STUCK_S = 5.0
STACKS_S = 2.0
CHECK_PERIOD_S = 0.25


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = LoopWatchdog("expert-3", STUCK_S, self.clock, STACKS_S)

    def check_for(self, seconds: float, *, moves: bool = False) -> str:
        """Check periodically; return the last problem."""
        for _ in range(round(seconds / CHECK_PERIOD_S)):
            self.clock.advance(CHECK_PERIOD_S)
            if moves:
                self.watch.record_progress()
            self.watch.check()
        return self.watch.problem


def test_stalled_loop_is_reported_by_name_until_it_makes_progress() -> None:
    loop = Watched()
    loop.watch.record_progress()
    assert loop.check_for(STUCK_S) == ""
    assert loop.check_for(2 * CHECK_PERIOD_S).startswith(
        "expert-3 has been stuck in one step for more than"
    )
    assert "channel.step_timeout_s" in loop.watch.problem
    loop.watch.record_progress()
    assert loop.check_for(CHECK_PERIOD_S) == ""
    assert loop.check_for(STUCK_S - CHECK_PERIOD_S) == ""


def test_time_in_which_the_process_was_stopped_counts_little() -> None:
    loop = Watched()
    loop.watch.record_progress()
    loop.check_for(CHECK_PERIOD_S)
    loop.clock.advance(100 * STUCK_S)  # SIGSTOP; the loop's thread has not run again yet
    assert loop.watch.check() == ""
    assert loop.check_for(STUCK_S - MAX_CHECK_S) == ""
    assert loop.check_for(2 * CHECK_PERIOD_S) != ""


def test_stalled_event_loop_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()

    def on_record(record: logging.LogRecord) -> bool:
        logged.set()
        return True

    caplog.handler.addFilter(on_record)
    watch = EventLoopWatchdog("ingress", 0.3)

    async def stand_still() -> None:
        watch.start(asyncio.get_running_loop())
        assert logged.wait(10.0)

    asyncio.run(stand_still())
    watch.close()
    caplog.handler.removeFilter(on_record)
    assert "assert logged.wait(10.0)" in caplog.records[0].getMessage()


SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def test_ended_process_and_remote_process_are_not_found(child: subprocess.Popen[bytes]) -> None:
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


def test_reused_pid_and_zombie_count_as_ended(child: subprocess.Popen[bytes]) -> None:
    there = process_identity_of(child.pid)
    assert not is_alive(process_identity_of(child.pid, later_ticks=1))
    child.send_signal(signal.SIGSTOP)
    assert is_alive(there), "stopped is not ended"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(there)


def test_process_in_another_network_namespace_is_not_local_and_can_be_killed(
    child: subprocess.Popen[bytes],
) -> None:
    """The link may be at fault, so a running process is no excuse."""
    there = msgspec.msgpack.decode(process_identity_of(child.pid), type=ProcessIdentity)
    there = msgspec.structs.replace(there, network="net:[1]")
    assert find_process(msgspec.msgpack.encode(there)) is None
    assert kill_process(msgspec.msgpack.encode(there))


def test_traced_process_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    process = LocalProcess(os.getpid())
    monkeypatch.setattr(process, "_fields", lambda: [b"t"])
    assert not is_hung(1.4, 1.5, process)
    assert is_hung(1.5, 1.5, process)
    process.close()
