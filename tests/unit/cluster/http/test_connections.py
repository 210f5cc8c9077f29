"""Connection limits and eviction."""

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from cluster.http.connections import (
    DEFAULT_CONNECTIONS,
    ConnectionTable,
    WaitState,
    connection_limit,
)
from cluster.http.server import bind
from contracts.config import HttpConfig
from contracts.errors import ResourceError
from tests.support.api_harness import TIMEOUT_S
from tests.support.front_harness import LOOPS, Front, get, is_ended, post, read_answer, serve_front

LIMIT = 4


class FakeConnection:
    """A connection that is neither timed out nor dropped."""

    wait: WaitState | None = None

    def __init__(self, address: str) -> None:
        self.address = address

    def time_out(self, wait: WaitState, limit_s: float) -> None:
        pytest.fail("nothing waits too long")

    def drop(self) -> None:
        pytest.fail("the table has room")


def test_connections_per_address_are_limited() -> None:
    table = ConnectionTable(LIMIT, HttpConfig(max_connections_per_address=2), time.monotonic)
    held = [FakeConnection("a"), FakeConnection("a")]
    assert all(table.admit(line) for line in held)
    assert not table.admit(FakeConnection("a"))
    assert table.admit(FakeConnection("b"))
    table.leave(held[0])
    assert table.admit(FakeConnection("a"))


@pytest.mark.parametrize(
    ("requested", "descriptors", "limit"),
    [
        (None, 1024, 768),
        (None, 20_000, DEFAULT_CONNECTIONS),
        (100, 1024, 100),
        (20_000, 1 << 20, 20_000),
        (20_000, 20_000, 17_500),
    ],
)
def test_connection_limit_leaves_descriptors_free(
    requested: int | None, descriptors: int, limit: int
) -> None:
    assert connection_limit(requested, descriptors) == limit


@pytest.fixture(params=LOOPS)
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    with serve_front(loop_kind=request.param, max_connections=LIMIT) as front:
        yield front


def test_silent_connections_are_evicted(front: Front) -> None:
    with contextlib.ExitStack() as lines:
        silent = [lines.enter_context(front.connect()) for _ in range(3 * LIMIT)]
        for _ in range(3 * LIMIT):
            assert front.exchange(get("/echo")).status == 200
        assert all(is_ended(line) for line in silent[: 2 * LIMIT])


def test_idle_connections_are_evicted_and_active_requests_continue(front: Front) -> None:
    with contextlib.ExitStack() as lines:
        busy = lines.enter_context(front.connect())
        busy.sendall(post("/hold", b"a"))
        assert front.app.entered.acquire(timeout=TIMEOUT_S)
        idle = [lines.enter_context(front.connect()) for _ in range(LIMIT - 1)]
        for line in idle:
            line.sendall(get("/echo"))
            assert read_answer(line).status == 200
        for _ in range(2 * LIMIT):
            line = lines.enter_context(front.connect())
            line.sendall(get("/echo"))
            assert read_answer(line).status == 200
        assert all(is_ended(line) for line in idle)
        front.release()
        assert read_answer(busy).status == 200


def test_new_connection_is_rejected_when_all_are_at_work(front: Front) -> None:
    with contextlib.ExitStack() as lines:
        busy = [lines.enter_context(front.connect()) for _ in range(LIMIT)]
        for line in busy:
            line.sendall(post("/hold", b"a"))
            assert front.app.entered.acquire(timeout=TIMEOUT_S)
        with front.connect() as line:
            answer = read_answer(line)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error["code"] == "too_many_connections"
            assert "all 4 connections are at work (http.max_connections)" in answer.error["message"]
            assert is_ended(line)
        front.release()
        assert all(read_answer(line).status == 200 for line in busy)
    assert front.exchange(get("/echo")).status == 200


def test_only_valid_key_proves_connection() -> None:
    with (
        serve_front(max_connections=2, api_keys=["k"]) as front,
        front.connect() as good,
        front.connect() as bad,
    ):
        for line, path in ((good, "/key"), (bad, "/echo")):
            line.sendall(get(path))
            assert read_answer(line).status == 200
        assert front.exchange(get("/echo")).status == 200, "in place of the older, invalid header"
        assert is_ended(bad)
        good.sendall(get("/key"))
        assert read_answer(good).status == 200


def test_proven_connection_is_kept_while_its_body_arrives() -> None:
    with (
        serve_front(max_connections=2, api_keys=["k"]) as front,
        front.connect() as good,
        front.connect() as bad,
    ):
        for line, path in ((good, "/upload"), (bad, "/echo")):
            line.sendall(post(path, b"a", length=2))
            assert front.app.entered.acquire(timeout=TIMEOUT_S)
        assert front.exchange(get("/echo")).status == 200
        assert is_ended(bad)
        good.sendall(b"b")
        assert read_answer(good).body == b"2"


def test_server_recovers_from_descriptor_exhaustion(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve_front() as front, contextlib.ExitStack() as lines:
        line = lines.enter_context(front.connect_later())
        with caplog.at_level(logging.WARNING, logger="tandem.front"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # lower numbers are open
            try:
                line.connect(("127.0.0.1", front.port))
                line.sendall(get("/echo"))
                for _ in range(1000):
                    front.loop.call(lambda: None)
                    if caplog.records:
                        break
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "accept_failed" in caplog.text
        assert read_answer(line).status == 200


def test_second_server_on_port_is_rejected() -> None:
    with serve_front() as front:
        with pytest.raises(ResourceError, match=f"port={front.port}"):
            bind("127.0.0.1", front.port)
        with pytest.raises(ResourceError, match=f"port={front.port}"):
            bind("0.0.0.0", front.port)
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", front.port))
        assert front.exchange(get("/echo")).status == 200
    bind("127.0.0.1", front.port).close()


def test_replicas_share_a_port_exclusively() -> None:
    with bind("127.0.0.1", 0, shares_port=True) as one:
        port = one.getsockname()[1]
        bind("127.0.0.1", port, shares_port=True).close()
        with pytest.raises(ResourceError, match=str(port)):
            bind("127.0.0.1", port)


def test_replica_takes_over_port_of_stopping_replica() -> None:
    with serve_front() as old:
        port = old.port
        follower = serve_front(port=port)
        line = old.connect()
        line.sendall(get("/echo"))
        assert read_answer(line).status == 200
        line.close()
    with follower as front:
        assert front.exchange(get("/echo")).status == 200
