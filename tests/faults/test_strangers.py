"""Silent, slow and noisy strangers on every listening socket of a rank."""

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from actors.channels import handshake, listener
from actors.channels.handshake import Identity
from actors.channels.heartbeat import LoopWatchdog
from actors.channels.listener import dial
from actors.gather.weight_link import PURPOSE
from actors.rpc.client_server import ClientServer
from contracts.clock import monotonic_s
from contracts.planner_messages import PLANNER_PURPOSE
from tests.support.channels_support import (
    TOKEN,
    endpoint,
    nothing_leaks,  # noqa: F401
)
from tests.support.fake_planner import TOKEN as PLANNER_TOKEN
from tests.support.fake_planner import real_planner
from tests.support.group_harness import group_config
from tests.support.prefill_workers import TOKEN as WEIGHTS_TOKEN
from tests.support.prefill_workers import make_source, worker_spec
from tests.support.tiny_models import Checkpoints

CROWD = 100
TIMEOUT_S = 20.0


class Listening(NamedTuple):
    """A listening socket of a rank and a peer's credentials."""

    address: str
    me: Identity
    purpose: str
    extra: bytes = b""

    def prove(self, deadline_s: float) -> None:
        """Authenticate and disconnect. Raises ChannelError."""
        with dial(self.address, deadline_s) as sock:
            handshake.initiate(
                sock,
                self.me,
                purpose=self.purpose,
                to=None,
                extra=self.extra,
                deadline_s=deadline_s,
            )


@contextlib.contextmanager
def channel(backend: str) -> Iterator[Listening]:
    end = endpoint("right", backend)
    try:
        extra = msgspec.msgpack.encode((backend, os.urandom(16)))
        me = Identity(name="left", token=TOKEN, epoch=1)
        yield Listening(end.listen(), me, "channel-data", extra)
    finally:
        end.close()


@contextlib.contextmanager
def clients() -> Iterator[Listening]:
    watch = LoopWatchdog("right", 60.0, monotonic_s)
    server = ClientServer("right", token=TOKEN, wake=lambda: None, watch=watch)
    try:
        address = server.listen("127.0.0.1", deadline_s=5.0)
        yield Listening(address, Identity(name="ingress", token=TOKEN, epoch=None), "requests")
    finally:
        server.close()


@contextlib.contextmanager
def weights(folder: Path, backend: str) -> Iterator[Listening]:
    source = make_source(worker_spec(folder, 1, 2, backend=backend))
    try:
        me = Identity(name="prefill-0", token=WEIGHTS_TOKEN, epoch=None)
        address = source.listen("127.0.0.1")
        yield Listening(address, me, PURPOSE, msgspec.msgpack.encode(source._terms))
    finally:
        source.close()


@contextlib.contextmanager
def planner(folder: Path) -> Iterator[Listening]:
    with real_planner(folder, group_config(), None) as made:
        me = Identity(name="attention-0", token=PLANNER_TOKEN, epoch=None)
        yield Listening(made.ready.channel_address, me, PLANNER_PURPOSE)


@pytest.fixture(params=["channel-shm", "channel-tcp", "weights-shm", "weights-tcp", "clients",
                        "planner"])  # fmt: skip
def listening(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints) -> Iterator[Listening]:
    kind, _, backend = request.param.partition("-")
    with contextlib.ExitStack() as stack:
        if kind == "channel":
            yield stack.enter_context(channel(backend))
        elif kind == "clients":
            yield stack.enter_context(clients())
        elif kind == "weights":
            yield stack.enter_context(weights(tiny_checkpoint("qwen3_moe"), backend))
        else:
            yield stack.enter_context(planner(tiny_checkpoint("qwen3_moe")))


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a thread or a task died."""
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    yield
    assert not died
    assert not [r for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]


@contextlib.contextmanager
def strangers(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Open silent connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(dial(address, 5.0)) for _ in range(count)]


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def ended(sock: socket.socket) -> bool:
    """Read until the other side closes; return whether it did."""
    sock.settimeout(TIMEOUT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stranger is closed for its silence within a test."""
    for limit in ("FIRST_BYTE_S", "HANDSHAKE_S"):
        monkeypatch.setattr(listener, limit, 10 * TIMEOUT_S)


@pytest.mark.usefixtures("long_limits")
def test_peer_joins_past_any_number_of_silent_strangers(listening: Listening) -> None:
    with strangers(listening.address, CROWD):
        listening.prove(TIMEOUT_S)


@pytest.mark.usefixtures("long_limits")
def test_strangers_hold_bounded_descriptors(listening: Listening) -> None:
    with strangers(listening.address, CROWD) as held:
        end_s = time.monotonic() + TIMEOUT_S
        while len(held := [sock for sock in held if is_open(sock)]) > listener.MAX_PER_ADDRESS:
            assert time.monotonic() < end_s, f"{len(held)} strangers are held"
            time.sleep(0.02)


def test_silent_stranger_is_closed_before_the_whole_deadline(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "FIRST_BYTE_S", 0.2)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 10 * TIMEOUT_S)
    with dial(listening.address, 5.0) as stranger:
        assert ended(stranger)


def test_slow_stranger_gets_no_more_time(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "FIRST_BYTE_S", 0.3)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.6)
    with dial(listening.address, 5.0) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\xff")  # of a length that is allowed: ff 00 00 00
            for _ in range(int(TIMEOUT_S / 0.1)):
                stranger.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1 << 16):
                        break
                stranger.sendall(b"\x00")
            else:
                pytest.fail("it may go on for ever")
        listening.prove(5.0)


def test_megabytes_of_garbage_are_not_read(listening: Listening) -> None:
    with dial(listening.address, 5.0) as stranger:
        stranger.settimeout(TIMEOUT_S)
        with pytest.raises(ConnectionError):
            stranger.sendall(b"nonsense" * (8 << 20))
        listening.prove(5.0)


def test_accept_without_descriptors_is_retried_without_spinning(
    listening: Listening, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    log_limited = listener.PendingHandshakes.log_limited

    def count(self: listener.PendingHandshakes, event: str, reason: str) -> None:
        tries.append(event)
        log_limited(self, event, reason)

    monkeypatch.setattr(listener.PendingHandshakes, "log_limited", count)
    _, rest = listening.address.split(":", 1)
    unix = listening.address.startswith("unix")
    target = "\0" + rest[1:] if unix else ("127.0.0.1", int(rest.rpartition(":")[2]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        family = socket.AF_UNIX if unix else socket.AF_INET
        waiting = [stack.enter_context(socket.socket(family)) for _ in range(3)]
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        start_s = time.monotonic()  # before the first of them can be tried
        for sock in waiting:
            sock.connect(target)
        end_s = start_s + TIMEOUT_S
        while len(tries) < 3:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert time.monotonic() - start_s >= 2 * listener.ACCEPT_RETRY_S
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        listening.prove(10.0)
    assert set(tries[:3]) == {"accept_failed"}
    assert len([r for r in caplog.records if "accept_failed" in r.getMessage()]) == 1
