"""The HTTP server on a real port, with an application for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from cluster.http.authenticator import PROVE
from cluster.http.server import HttpServer
from contracts.config import HttpConfig
from tests.support.api_harness import TIMEOUT_S, Loop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
PIECE = b"x" * (64 << 10)


class App:
    """An application for tests of the server.

    Routes: /echo returns the body's length; /open answers before reading it; /key also proves the
    client; /upload proves it and reads; /hold waits for a disconnect or `release`; /silent does so
    between two pieces; /stream writes forever.

    left: set when a client disconnects.
    """

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.left = threading.Event()
        self.release = asyncio.Event()
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = list(scope["headers"])
        self.entered.release()
        path = scope["path"]
        body = b""
        if path == "/echo":
            body = await self._read(receive)
        elif path in ("/key", "/upload"):
            scope["state"][PROVE]()
            body = await self._read(receive) if path == "/upload" else b""
        elif path == "/hold":
            await self._read(receive)
            await self._hold(receive)
        elif path == "/stream":
            await self._stream(receive, send)
            return
        elif path == "/silent":
            await self._read(receive)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await self._hold(receive)
            await send({"type": "http.response.body", "body": b"x"})
            return
        self.headers = list(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [_length(body)]})
        await send({"type": "http.response.body", "body": str(len(body)).encode()})

    async def _read(self, receive: Receive) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return b""
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body

    async def _hold(self, receive: Receive) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        tasks = [asyncio.create_task(gone()), asyncio.create_task(self.release.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _stream(self, receive: Receive, send: Send) -> None:
        await self._read(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)
        self.left.set()


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(str(len(body)))).encode()


class Front:
    """A running server and raw connections to it."""

    def __init__(self, port: int, app: App, loop: Loop, front: HttpServer) -> None:
        self.port = port
        self.app = app
        self.loop = loop
        self.front = front

    def connect(self) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    def connect_later(self) -> socket.socket:
        """Return an unconnected socket, for a process without free descriptors."""
        line = socket.socket()
        line.settimeout(TIMEOUT_S)
        return line

    def exchange(self, data: bytes) -> Answer:
        """Return the first answer to `data` on a new connection."""
        with self.connect() as line:
            line.sendall(data)
            return read_answer(line)

    def release(self) -> None:
        self.loop.call(self.app.release.set)


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def read_answer(line: socket.socket) -> Answer:
    """Read one answer. Raises EOFError if the connection closes instead."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _exactly(line, 1)
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (one.partition(":") for one in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = _exactly(line, int(headers.get("content-length", "0")))
    return Answer(int(first.split()[1]), headers, body)


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise EOFError("the connection has ended")
        data += piece
    return data


def is_ended(line: socket.socket) -> bool:
    """Return whether the server closes the connection without sending anything."""
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def get(path: str, *headers: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", "Host: tandem", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = (f"POST {path} HTTP/1.1", "Host: tandem", f"Content-Length: {size}", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@contextlib.contextmanager
def serve_front(
    http: HttpConfig | None = None, *, loop_kind: str = "asyncio", app: Any = None, **limits: Any
) -> Iterator[Front]:
    """Serve with these limits: fields of HttpConfig."""
    config = http or HttpConfig(**{"port": 0, **limits})
    loop = Loop(LOOPS[loop_kind])

    async def start() -> tuple[App, HttpServer]:
        made = app or App()
        front = HttpServer(made, config)
        await front.start()
        return made, front

    made, front = loop.run(start())
    try:
        yield Front(front.port, made, loop, front)
    finally:
        if isinstance(made, App):
            loop.call(made.release.set)
        loop.run(front.close())
        loop.close()


@pytest.fixture(autouse=True)
def the_next_good_request_is_served(front: Front) -> Iterator[None]:
    """Fixture: after each test the server still serves."""
    yield
    assert front.exchange(post("/echo", b"abc")).body == b"3"
