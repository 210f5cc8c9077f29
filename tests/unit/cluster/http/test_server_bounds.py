"""Bounds on heads, trailers, chunks and pipelined requests."""

import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.http.protocol import MAX_CHUNKS, MAX_PIPELINED, MAX_TARGET_BYTES
from tests.support.front_harness import (
    LOOPS,
    Answer,
    Front,
    get,
    is_ended,
    post,
    read_answer,
    serve_front,
    the_next_good_request_is_served,  # noqa: F401
)

HEADER_BYTES = 1024
MAX_HEADERS = 10
CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture(scope="module", params=LOOPS)
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    limits: Any = {"max_header_bytes": HEADER_BYTES, "max_headers": MAX_HEADERS}
    with serve_front(loop_kind=request.param, body_timeout_s=5.0, **limits) as front:
        yield front


def chunked(path: str, *pieces: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: tandem\r\n{CHUNKED}\r\n\r\n"
    return head.encode() + b"".join(pieces)


def sent_until_answered(line: socket.socket, piece: bytes) -> Answer:
    """Send the pieces one by one until the server answers."""
    for _ in range(1000):
        line.sendall(piece)
        if select.select([line], [], [], 0.01)[0]:
            break
    return read_answer(line)


def test_answers_do_not_wait_for_acknowledgements(front: Front) -> None:
    """Nagle's algorithm holds the second part of an answer for the client's delayed ACK."""
    with front.connect() as line:
        line.sendall(post("/echo", b"abc"))
        read_answer(line)
        own = line.getsockname()

        async def options() -> list[int]:
            transports = [each.transport for each in front.front.state.connections]  # type: ignore[union-attr]
            return [
                each.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                for each in transports
                if each.get_extra_info("peername") == own
            ]

        assert front.loop.run(options()) == [1]


def test_header_bytes_over_limit_get_431_naming_limit(front: Front) -> None:
    answer = front.exchange(get("/echo", "X-Much: " + "a" * HEADER_BYTES))
    assert answer.status == 431
    assert answer.error["code"] == "headers_too_large"
    assert "at most 1024 are accepted (http.max_header_bytes)" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("name", ["X-Much: ", "X-" * 9])
def test_endless_header_is_read_up_to_limit(front: Front, name: str) -> None:
    with front.connect() as line:
        line.sendall(f"GET /echo HTTP/1.1\r\n{name}".encode())
        for _ in range(5):
            line.sendall(b"a" * (HEADER_BYTES // 4))
        assert read_answer(line).status == 431
        assert is_ended(line)


def test_empty_lines_before_request_count_as_header_bytes(front: Front) -> None:
    with front.connect() as line:
        line.sendall(b"\r\n" * HEADER_BYTES)
        assert read_answer(line).status == 431


def test_header_count_over_limit_gets_431(front: Front) -> None:
    answer = front.exchange(get("/echo", *(f"X-{number}: 1" for number in range(MAX_HEADERS))))
    assert answer.status == 431
    assert "11 headers, at most 10 are accepted (http.max_headers)" in answer.error["message"]
    assert front.exchange(get("/echo", *(f"X-{number}: 1" for number in range(9)))).status == 200


def test_long_target_gets_414() -> None:
    with serve_front() as wide:
        answer = wide.exchange(get("/echo?" + "a" * MAX_TARGET_BYTES))
        assert answer.status == 414
        assert answer.error["code"] == "target_too_long"


def test_trailers_are_bounded_and_not_headers(front: Front) -> None:
    answer = front.exchange(
        chunked("/echo", b"3\r\nabc\r\n0\r\nAuthorization: Bearer late\r\n\r\n")
    )
    assert (answer.status, answer.body) == (200, b"3")
    assert all(name != b"authorization" for name, _ in front.app.headers)
    large = b"X-Much: " + b"a" * HEADER_BYTES
    for trailers in (large + b"\r\n\r\n", b"X-A: 1\r\n" * 11 + b"\r\n"):
        assert front.exchange(chunked("/echo", b"3\r\nabc\r\n0\r\n", trailers)).status == 431
    with front.connect() as line:
        line.sendall(chunked("/echo", b"3\r\nabc\r\n0\r\nX-Much: "))
        assert sent_until_answered(line, b"a" * 100).status == 431


def test_endless_chunk_extension_is_rejected(front: Front) -> None:
    with front.connect() as line:
        line.sendall(chunked("/echo", b"3;"))
        assert sent_until_answered(line, b"a" * 100).status == 431


@pytest.mark.parametrize(("size", "status"), [(b"5 ", 200), (b"5 \t;a=b", 200), (b"5 5", 400)])
def test_blanks_behind_chunk_size_are_ignored(front: Front, size: bytes, status: int) -> None:
    """RFC 9112, 7.1 forbids them; nginx and h11 accept them, and no other reading exists."""
    answer = front.exchange(chunked("/echo", size + b"\r\nabcde\r\n", b"0 \r\n\r\n"))
    assert answer.status == status
    if status == 200:
        assert answer.body == b"5"


def test_body_in_single_byte_chunks_is_rejected(front: Front) -> None:
    answer = front.exchange(chunked("/echo", b"1\r\na\r\n" * (2 * MAX_CHUNKS)))
    assert answer.status == 400
    assert "send chunks of at least" in answer.error["message"]
    whole = b"".join([b"40\r\n" + b"a" * 64 + b"\r\n"] * (2 * MAX_CHUNKS)) + b"0\r\n\r\n"
    assert front.exchange(chunked("/echo", whole)).body == str(128 * MAX_CHUNKS).encode()


@pytest.mark.parametrize(
    "head",
    [
        f"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n{CHUNKED}\r\n\r\n",
        f"POST /echo HTTP/1.1\r\n{CHUNKED}\r\nContent-Length: 3\r\n\r\n",
        "POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        "POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
        "POST /echo HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
        "POST /echo HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        "GET /echo HTTP/1.1\r\nX A: b\r\n\r\n",
        "GET /echo HTTP/1.1\r\nX: a\nY: b\r\n\r\n",
        "GET /echo HTTP/1.1\r\n X: folded\r\n\r\n",
        "CONNECT tandem:80 HTTP/1.1\r\nHost: tandem\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "nonsense\r\n\r\n",
    ],
)
def test_ambiguous_framing_gets_400_and_closes_connection(front: Front, head: str) -> None:
    with front.connect() as line:
        line.sendall(head.encode("latin-1"))
        answer = read_answer(line)
        assert answer.status == 400
        assert answer.error["code"] == "malformed_http"
        assert is_ended(line)


UPGRADES = ("h2c", "websocket", "TLS/1.0, HTTP/2.0")
BODY = b"POST /x HTTP/1.1\r\n\r\n"  # looks like a head


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 16])
def test_offered_upgrade_is_ignored_however_the_request_is_split(
    front: Front, upgrade: str, piece_bytes: int
) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMA")
    in_chunks = b"%x\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(BODY), BODY)
    requests = {
        get("/echo", *offer): b"0",
        post("/echo", BODY, *offer): b"%d" % len(BODY),
        chunked("/echo", in_chunks).replace(
            CHUNKED.encode(), "\r\n".join((CHUNKED, *offer)).encode()
        ): (b"%d" % len(BODY)),
        post("/echo", b"abc"): b"3",
    }
    data = b"".join(requests)
    with front.connect() as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), piece_bytes):
            line.sendall(data[start : start + piece_bytes])
        for expected in requests.values():
            answer = read_answer(line)
            assert (answer.status, answer.body) == (200, expected), answer.body


def test_upgrade_without_body_then_other_bytes_is_400(front: Front) -> None:
    with front.connect() as line:
        line.sendall(get("/echo", "Connection: Upgrade", "Upgrade: h2c") + b"\0\1\2")
        assert read_answer(line).status == 200
        assert is_ended(line)


def test_expect_100_continue_is_answered_when_body_is_read(front: Front) -> None:
    with front.connect() as line:
        line.sendall(post("/echo", b"", "Expect: 100-continue", length=3))
        assert read_answer(line).status == 100
        line.sendall(b"abc")
        assert read_answer(line).body == b"3"
        line.sendall(post("/open", b"", "Expect: 100-continue", length=3))
        assert read_answer(line).status == 200, "not requested"


def test_expectation_of_http_1_0_is_ignored(front: Front) -> None:
    head = post("/echo", b"", "Expect: 100-continue", length=3).replace(b"HTTP/1.1", b"HTTP/1.0")
    with front.connect() as line:
        line.sendall(head)
        line.sendall(b"abc")
        assert read_answer(line).body == b"3"


@pytest.mark.parametrize(
    "target", ["http://h:80/echo", "http://h/echo?a=/b", "HTTP://h", "http://h?a"]
)
def test_target_may_be_a_whole_url(front: Front, target: str) -> None:
    assert front.exchange(get(target)).status == 200


def test_pipelined_requests_are_answered_in_order_up_to_limit(front: Front) -> None:
    some = [b"a" * size for size in range(1, MAX_PIPELINED + 1)]
    with front.connect() as line:
        line.sendall(b"".join(post("/echo", body) for body in some))
        for body in some:
            answer = read_answer(line)
            assert answer.body == str(len(body)).encode()
            assert "connection" not in answer.headers
        line.sendall(get("/echo") * 1000)
        answers = [read_answer(line) for _ in range(MAX_PIPELINED + 1)]
        assert [answer.headers.get("connection") for answer in answers] == [
            *[None] * MAX_PIPELINED,
            "close",
        ]
        assert is_ended(line)


def test_request_sent_byte_by_byte_is_answered(front: Front) -> None:
    with front.connect() as line:
        for byte in post("/echo", b"abc"):
            line.sendall(bytes([byte]))
        assert read_answer(line).body == b"3"


def test_bad_pipelined_request_does_not_affect_earlier_answer(front: Front) -> None:
    """uvicorn wrote its 400 into the answer under way."""
    with front.connect() as line:
        line.sendall(post("/hold", b"a"))
        assert front.app.entered.acquire(timeout=5)
        line.sendall(b"nonsense\r\n\r\n")
        front.release()
        assert read_answer(line).body == b"0"
        assert is_ended(line)


def test_broken_body_is_400_and_application_is_notified_of_disconnect(front: Front) -> None:
    front.app.left.clear()
    with front.connect() as line:
        line.sendall(chunked("/echo", b"3\r\nabc\r\n"))
        line.sendall(b"nonsense\r\n")
        assert read_answer(line).status == 400
    assert front.app.left.wait(5)
