"""Requests as bytes on a connection, well-formed or malformed, and answers read from it."""

import asyncio
import random
import time
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import msgspec

from benchmarks.robustness.fuzz.oracle import LIMIT_S, Answer
from benchmarks.robustness.fuzz.requests import FuzzRequest

TIMEOUT_S = 4 * LIMIT_S  # of a client; the oracle allows LIMIT_S
INCOMPLETE_S = 0.2  # wait for the answer to a malformed request, which may be incomplete
Head = Callable[[FuzzRequest, random.Random], bytes]


def plain(request: FuzzRequest) -> bytes:
    """Return the request as a regular client sends it."""
    lines = [*_line(request), *(f"{name}: {value}" for name, value in request.headers)]
    return _bytes([*lines, f"content-length: {len(request.body)}"]) + request.body


def _line(request: FuzzRequest) -> list[str]:
    target = quote(request.path, safe="/%:@!$&'()*+,;=~-._")
    query = f"?{request.query}" if request.query else ""
    return [f"{request.method} {target}{query} HTTP/1.1", "host: tandem"]


def _bytes(lines: list[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _with_lines(*made: Callable[[random.Random], str]) -> Head:
    def odd(request: FuzzRequest, dice: random.Random) -> bytes:
        sent = plain(request)
        line, _, rest = sent.partition(b"\r\n")
        more = "\r\n".join(make(dice) for make in made).encode("latin-1", "replace")
        return line + b"\r\n" + more + b"\r\n" + rest

    return odd


def _chunked(request: FuzzRequest, dice: random.Random) -> bytes:
    lines = [*_line(request), *(f"{name}: {value}" for name, value in request.headers)]
    head = _bytes([*lines, "transfer-encoding: chunked"])
    size = dice.choice((b"%x", b"%X;a=b", b"00%x")) % len(request.body)
    return head + size + b"\r\n" + request.body + b"\r\n0\r\n\r\n"


def _bad_chunks(request: FuzzRequest, dice: random.Random) -> bytes:
    lines = [*_line(request), "transfer-encoding: chunked", "content-type: application/json"]
    size = dice.choice((b"-1", b"zz", b"ffffffffffffffff", b"", b"0x5", b"5" * 40))
    return _bytes(lines) + size + b"\r\n" + request.body[:100]


def _flipped(request: FuzzRequest, dice: random.Random) -> bytes:
    changed = bytearray(plain(request))
    end = changed.index(b"\r\n\r\n")
    for _ in range(dice.choice((1, 3))):
        changed[dice.randrange(end)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _cut(request: FuzzRequest, dice: random.Random) -> bytes:
    sent = plain(request)
    return sent[: dice.randrange(len(sent))]


def _other_line(request: FuzzRequest, dice: random.Random) -> bytes:
    first = dice.choice(
        (
            *("POST /v1/completions", "POST /v1/completions HTTP/0.9", "post /health HTTP/1.1"),
            *("GET http://other/health HTTP/1.1", "CONNECT tandem:80 HTTP/1.1", "GET * HTTP/1.1"),
            *("PRI * HTTP/2.0", "\x16\x03\x01\x02", "GET /health HTTP/9.9", "", "GET  /health"),
            "GET /" + "a" * 20_000 + " HTTP/1.1",
        )
    )
    return first.encode("latin-1") + b"\r\nhost: tandem\r\n\r\n"


def _noise(request: FuzzRequest, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((1, 10, 1000, 20_000)))


MALFORMED: dict[str, Head] = {
    "many headers": _with_lines(lambda dice: "\r\n".join(f"x-{n}: y" for n in range(300))),
    "a long header": _with_lines(lambda dice: "x: " + "y" * dice.choice((9000, 70_000, 300_000))),
    "two lengths": _with_lines(lambda dice: f"content-length: {dice.choice((0, 1, 5, 10**6))}"),
    "an odd length": _with_lines(
        lambda dice: "content-length: " + dice.choice(("-1", "x", "1e3", "9" * 30, "", "5, 5"))
    ),
    "length and chunks": _with_lines(lambda dice: "transfer-encoding: chunked"),
    "an odd coding": _with_lines(lambda dice: "transfer-encoding: " + dice.choice(("gzip", "x"))),
    "odd names": _with_lines(
        lambda dice: dice.choice((": a", "a b: c", "é: x", "no colon", " folded", "a\0: b"))
    ),
    "an upgrade": _with_lines(lambda dice: "connection: upgrade", lambda dice: "upgrade: h2c"),
    "expects": _with_lines(lambda dice: "expect: " + dice.choice(("100-continue", "a miracle"))),
    "a request id": _with_lines(
        lambda dice: "x-request-id: " + dice.choice(("a", "é\x01", "a" * 5000, "", "\x7f", "a,b"))
    ),
    "no keep-alive": _with_lines(lambda dice: "connection: close"),
    "chunks": _chunked,
    "bad chunks": _bad_chunks,
    "flipped": _flipped,
    "cut": _cut,
    "another line": _other_line,
    "noise": _noise,
}


def malformed(request: FuzzRequest, seed: int) -> FuzzRequest:
    """Return the request, in 5 % of all cases marked to be sent malformed."""
    dice = random.Random(f"wire {seed}/{request.number}")
    wire = dice.choice(sorted(MALFORMED)) if dice.random() < 0.05 else ""
    return msgspec.structs.replace(request, wire=wire)


class OverHttp:
    """Sends requests to a server, each on a connection of its own."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._seed = seed

    async def send(self, request: FuzzRequest) -> Answer:
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(INCOMPLETE_S if request.wire else TIMEOUT_S):
                answer = await self._exchange(request)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            answer = Answer(NO_ANSWER, {}, b"", 0.0, "" if request.wire else repr(error))
        answer.duration_s = time.perf_counter() - started_s
        return answer

    async def _exchange(self, request: FuzzRequest) -> Answer:
        """A server may answer and close before it has read the whole request."""
        dice = random.Random(f"bytes {self._seed}/{request.number}")
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(MALFORMED[request.wire](request, dice) if request.wire else plain(request))
            return await read_answer(reader, request.method)
        finally:
            writer.close()


NO_ANSWER = 299  # acceptable for a malformed request


async def read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    """Raises EOFError or OSError if the connection ends before the answer is complete."""
    status, headers = await _read_head(reader)
    while status == 100:
        status, headers = await _read_head(reader)
    if method == "HEAD" or status == 204:
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Answer(status, headers, body, 0.0)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return int(first.split(" ")[1]), headers


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return bytes(body)
