"""Deadlines of clients: headers, body, idle connections, reading the answer."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.config import HttpConfig
from tests.support.api_harness import TIMEOUT_S, serve_api
from tests.support.front_harness import (
    LOOPS,
    Front,
    get,
    is_ended,
    post,
    read_answer,
    serve_front,
    the_next_good_request_is_served,  # noqa: F401
)

pytestmark = pytest.mark.long

SHORT_S = 0.3


@pytest.fixture(scope="module", params=LOOPS)
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    limits: Any = {"header_timeout_s": SHORT_S, "write_timeout_s": SHORT_S}
    kept_s = 2 * SHORT_S
    with serve_front(loop_kind=request.param, keep_alive_timeout_s=kept_s, **limits) as front:
        yield front


@pytest.mark.parametrize("half", ["G", "GET /echo HT", "GET /echo HTTP/1.1\r\nHost: tan"])
def test_incomplete_header_gets_408_and_closes_connection(front: Front, half: str) -> None:
    with front.connect() as line:
        line.sendall(half.encode())
        answer = read_answer(line)
        assert answer.status == 408
        assert "(http.header_timeout_s)" in answer.error["message"]
        assert is_ended(line)


def test_slow_headers_do_not_extend_deadline(front: Front) -> None:
    with front.connect() as line:
        line.sendall(b"GET /echo HTTP/1.1\r\nX: ")
        line.settimeout(0.02)
        for _ in range(1000):
            line.sendall(b"a")
            try:
                head = line.recv(12)
            except TimeoutError:
                continue
            assert head == b"HTTP/1.1 408"
            return
        pytest.fail("it goes on for ever")


def test_request_at_work_is_not_timed_out_by_server(front: Front) -> None:
    with front.connect() as line:
        line.sendall(post("/hold", b"a"))
        with front.connect() as silent, front.connect() as other:
            other.sendall(get("/echo"))
            assert read_answer(other).status == 200
            assert is_ended(silent), "deadline passed"
            assert is_ended(other), "twice the limit"
        front.release()
        assert read_answer(line).status == 200


def test_remaining_body_after_answer_times_out(front: Front) -> None:
    with front.connect() as line:
        line.sendall(post("/open", b"a", length=10))
        assert read_answer(line).status == 200
        assert is_ended(line)
    with front.connect() as line:
        line.sendall(post("/open", b"a", length=2))
        assert read_answer(line).status == 200
        line.sendall(b"a" + get("/echo"))
        assert read_answer(line).status == 200, "the body is complete: the connection stays usable"


def test_client_not_reading_answer_is_disconnected(front: Front) -> None:
    front.app.left.clear()
    with front.connect() as line:
        line.sendall(get("/stream"))
        assert front.app.left.wait(TIMEOUT_S)


def test_slow_reader_receives_whole_answer() -> None:
    """The deadline applies to progress, not to the whole answer."""
    with serve_front(write_timeout_s=SHORT_S) as front, front.connect() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        line.sendall(get("/stream"))
        for _ in range(200):
            with front.connect() as other:  # paced by another client's requests
                other.sendall(get("/echo"))
                read_answer(other)
            assert line.recv(1 << 16)
        assert not front.app.left.is_set()


def test_half_closed_client_gets_its_answer_and_closed_one_is_noticed(front: Front) -> None:
    front.loop.call(front.app.release.clear)
    for path, version in (("/hold", b"1.1"), ("/hold", b"1.0"), ("/silent", b"1.1")):
        front.app.left.clear()
        with front.connect() as line:
            line.sendall(post(path, b"a").replace(b"1.1", version, 1))
        assert front.app.left.wait(TIMEOUT_S)
    with front.connect() as line, front.connect() as stream:
        line.sendall(post("/hold", b"a"))
        line.shutdown(socket.SHUT_WR)
        stream.sendall(post("/silent", b"a"))
        stream.shutdown(socket.SHUT_WR)
        assert read_answer(line).status == 100, "shows whether the client still reads"
        assert read_answer(stream).status == 200
        data = b""
        while data[-1:] != b"0":  # shows the same
            data += stream.recv(64)
        front.release()
        data += b"".join(iter(lambda: stream.recv(64), b""))
        assert data == b"1\r\nx\r\n01\r\nx\r\n0\r\n\r\n"
        assert read_answer(line).headers["connection"] == "close"


def test_incomplete_body_gets_408_naming_limit(folder: Path) -> None:
    http = HttpConfig(body_timeout_s=SHORT_S)
    with serve_api(folder, None, http) as api, api.connect() as line:
        line.sendall(post("/v1/completions", b"{", length=100))
        answer = read_answer(line)
        assert answer.status == 408
        assert answer.error["code"] == "request_timeout"
        assert "0.3 s (http.body_timeout_s)" in answer.error["message"]
        assert is_ended(line)
