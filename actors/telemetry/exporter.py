"""A process's own metrics on a port of their own, for a Prometheus to scrape.

scraper ── GET /metrics/ID ──> Exporter, in an event loop
        <── text or OpenMetrics ──   one exposition at a time, shared by all who wait (scrapes.py)

ID is drawn anew by each process: whoever has its port later does not answer under its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from actors.telemetry.scrape_coalescer import ScrapeCoalescer
from actors.telemetry.telemetry import CONTENT_TYPE, OPEN_METRICS_TYPE, Telemetry
from contracts.clock import monotonic_s
from contracts.logs import event

log = logging.getLogger("tandem.metrics")

PATH = "/metrics"
MAX_CONNECTIONS = 16  # at a time; more wait in the kernel, where they cost nothing
MAX_HEAD_BYTES = 8 << 10
HEAD_S = 5.0  # for the whole request
WRITE_S = 5.0  # for the whole answer: it is smaller than a socket's buffer
PAUSE_S = 1.0  # after an error of accepting: no descriptor is left
THREAD_S = 5.0


class _Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]

    @property
    def accepts_open_metrics(self) -> bool:
        return "application/openmetrics-text" in self.headers.get("accept", "")


Key = str | None | Callable[[], str | None]
"""The bearer token that a scraper must carry, or what says it at each scrape, in a thread of its
own; None: open to all."""


class Exporter:
    """Of one event loop."""

    def __init__(self, telemetry: Telemetry, *, key: Key) -> None:
        self._key = key
        self._path = f"{PATH}/{secrets.token_hex(8)}"
        self._text = ScrapeCoalescer(_exposition_of(telemetry, False), monotonic_s)
        self._open_metrics = ScrapeCoalescer(_exposition_of(telemetry, True), monotonic_s)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._answering: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, host: str) -> str:
        """Listens on a free port of `host`; "host:port/path", as `RankReady` has it. Raises
        OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        listening.setblocking(False)
        self._listening = listening
        self._accepting = asyncio.create_task(self._accept(listening))
        port = listening.getsockname()[1]
        return f"{f'[{host}]' if ':' in host else host}:{port}{self._path}"

    async def close(self) -> None:
        """May be called twice."""
        tasks = [*self._answering, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                self._slots.release()
                event(log, "exporter_accept_failed", logging.WARNING, error=error)
                await asyncio.sleep(PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._answering.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._slots.release()

    async def _serve(self, connection: socket.socket) -> None:
        """One request. A client that is slow, gone, or no client of HTTP is let go."""
        with contextlib.suppress(OSError, TimeoutError, ValueError, EOFError), connection:
            async with asyncio.timeout(HEAD_S):
                request = await _read(connection)
            answer = await self._answer(request)
            async with asyncio.timeout(WRITE_S):
                await asyncio.get_running_loop().sock_sendall(connection, answer)

    async def _answer(self, request: _Request) -> bytes:
        if request.method != "GET":
            return _response("405 Method Not Allowed", "GET only\n")
        if request.path not in (PATH, self._path):
            return _response("404 Not Found", "not here\n")
        key = await asyncio.to_thread(self._key) if callable(self._key) else self._key
        if key is not None and not _is_authorized(request, key):
            return _response("401 Unauthorized", "Authorization: Bearer (http.metrics_key)\n")
        if request.accepts_open_metrics:
            return _response("200 OK", await self._open_metrics.text(), OPEN_METRICS_TYPE)
        return _response("200 OK", await self._text.text(), CONTENT_TYPE)


class ExporterThread:
    """An `Exporter` in a thread of its own, beside whatever loop the process has."""

    def __init__(self, telemetry: Telemetry, *, key: Key, name: str) -> None:
        self._telemetry, self._key, self._name = telemetry, key, name
        self._exporter: Exporter | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{name}-metrics", daemon=True)

    def open(self, host: str) -> str:
        """As `Exporter.open`, but "" where that is not to be had: a process is of use without."""
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(host), self._loop)
        try:
            return opening.result(THREAD_S)
        except OSError as error:  # TimeoutError too
            reason = error.strerror or "timed out"
            name = self._name
            event(log, "exporter_failed", logging.WARNING, name=name, host=host, reason=reason)
            return ""

    def close(self) -> None:
        """May be called twice, from any thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(THREAD_S)

    async def _open(self, host: str) -> str:
        self._exporter = Exporter(self._telemetry, key=self._key)
        return await self._exporter.open(host)

    def _run(self) -> None:
        self._loop.run_forever()
        if self._exporter is not None:
            self._loop.run_until_complete(self._exporter.close())
        self._loop.close()


def _exposition_of(telemetry: Telemetry, open_metrics: bool) -> Callable[[], Awaitable[str]]:
    async def make() -> str:
        return telemetry.exposition(open_metrics=open_metrics)

    return make


async def _read(connection: socket.socket) -> _Request:
    """Raises ValueError for what is no head of a request, EOFError for a part of one."""
    head, loop = b"", asyncio.get_running_loop()
    while b"\r\n\r\n" not in head:
        more = await loop.sock_recv(connection, MAX_HEAD_BYTES)
        if not more:
            raise EOFError
        head += more
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a head of over {MAX_HEAD_BYTES} bytes")
    first, *rest = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.partition(":") for line in rest)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return _Request(method, target.partition("?")[0], headers)


def _is_authorized(request: _Request, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), key.encode())
    return scheme.lower() == "bearer" and right


def _response(status: str, body: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    content = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
