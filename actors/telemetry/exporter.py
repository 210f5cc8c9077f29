"""HTTP server for the metrics of one process, which Prometheus scrapes.

The page is `prometheus_client`'s WSGI application behind a bearer token. Its path contains a random
id, so that a process that later gets the same port does not answer for this one.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from actors.telemetry.telemetry import Telemetry
from contracts.api_keys import read_keys
from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig
from contracts.errors import ConfigError
from contracts.logs import event

SETTLE_S = 1.0  # a change applies once it is this old, so that it is complete

_FileState = tuple[int, int, int] | None  # identity of the contents; None: no file


class ScrapeKey:
    """Returns the current token. Thread-safe.

    A file that is not on this machine, or is invalid, is ignored; the previous token stays.
    """

    def __init__(self, http: HttpConfig, clock: Clock = monotonic_s) -> None:
        self._configured, self._clock, self._lock = http.metrics_key, clock, Lock()
        self._path = None if http.keys_file is None else Path(http.keys_file)
        self._key = http.metrics_key
        self._loaded: _FileState = None
        self._seen, self._since_s = self._stat(), clock()
        if self._seen is not None:
            self._load(self._seen)

    def __call__(self) -> str | None:
        """Return the token; None: no authentication."""
        if self._path is None:
            return self._key
        with self._lock:
            seen, now_s = self._stat(), self._clock()
            if seen != self._seen:
                self._seen, self._since_s = seen, now_s
            if seen not in (None, self._loaded) and now_s - self._since_s >= SETTLE_S:
                self._load(seen)
            return self._key

    def _stat(self) -> _FileState:
        try:
            found = None if self._path is None else os.stat(self._path)
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def _load(self, seen: _FileState) -> None:
        assert self._path is not None
        try:
            key = read_keys(self._path).metrics_key or self._configured
        except ConfigError as error:
            key = self._key
            event(log, "scrape_key_kept", logging.WARNING, reason=error)
        if self._stat() == seen:  # otherwise it has changed meanwhile
            self._key, self._loaded = key, seen


log = logging.getLogger("tandem.metrics")

PATH = "/metrics"
MAX_CONNECTIONS = 16  # further ones wait in the kernel
READ_TIMEOUT_S = 5.0  # for each read
DEADLINE_S = 10.0  # for a connection in total
COLLECT_TIMEOUT_S = 5.0
POLL_S = 0.1  # of the accept loop for `close`
SHARE = 0.05  # maximum fraction of time spent on pages
MAX_PAUSE_S = 1.0

Key = str | None | Callable[[], str | None]
"""The bearer token, or a function that returns it; None: no authentication."""


class Exporter:
    """Metrics server in threads of its own. loop: collect metrics in this event loop."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        key: Key,
        name: str,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._key, self._name = key, name
        self._path = f"{PATH}/{secrets.token_hex(8)}"
        collector = telemetry if loop is None else _LoopCollector(telemetry, loop)
        self._page = make_wsgi_app(collector, disable_compression=True)
        self._turn, self._free_s = threading.Lock(), float("-inf")
        self._server: _Server | None = None

    def open(self, host: str) -> str:
        """Listen on a free port of `host`. Return "host:port/path", or "" if that fails."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server: Any
        server_class = type("_Server", (_Server,), {"address_family": family})
        try:
            server = make_server(host, 0, self._answer, server_class, _Handler)
        except OSError as error:
            reason = error.strerror or error
            event(
                log, "exporter_failed", logging.WARNING, name=self._name, host=host, reason=reason
            )
            return ""
        self._server = server
        serve = partial(server.serve_forever, POLL_S)
        threading.Thread(target=serve, name=f"{self._name}-metrics", daemon=True).start()
        return f"{f'[{host}]' if ':' in host else host}:{server.server_port}{self._path}"

    def close(self) -> None:
        """Stop listening. May be called twice, from any thread."""
        server, self._server = self._server, None
        if server is not None:
            server.is_closing = True
            server.shutdown()
            server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        key = self._key() if callable(self._key) else self._key
        if environ["PATH_INFO"] not in (PATH, self._path):
            return _error(start_response, "404 Not Found", b"not found\n")
        if key is not None and not _is_authorized(environ, key):
            hint = b"Authorization: Bearer (http.metrics_key)\n"
            return _error(start_response, "401 Unauthorized", hint)
        with self._turn:  # one page at a time, and at most SHARE of the time
            sleep(max(0.0, self._free_s - monotonic_s()))
            start_s = monotonic_s()
            page: Iterable[bytes] = self._page({**environ, "QUERY_STRING": ""}, start_response)
            end_s = monotonic_s()
            self._free_s = end_s + min(MAX_PAUSE_S, (end_s - start_s) * (1 / SHARE - 1))
        return page


class _LoopCollector:
    """Collects in an event loop, for callbacks that read the loop's state."""

    def __init__(self, telemetry: Telemetry, loop: asyncio.AbstractEventLoop) -> None:
        self._telemetry, self._loop = telemetry, loop

    def collect(self) -> Iterable[Any]:
        async def collect() -> Iterable[Any]:
            return self._telemetry.collect()

        collecting = asyncio.run_coroutine_threadsafe(collect(), self._loop)
        return collecting.result(COLLECT_TIMEOUT_S)


class _Server(ThreadingWSGIServer):  # type: ignore[misc]
    """A thread per connection, at most MAX_CONNECTIONS, each for at most DEADLINE_S."""

    request_queue_size = MAX_CONNECTIONS
    is_closing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        while not self._slots.acquire(timeout=POLL_S):
            if self.is_closing:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:
        deadline = threading.Timer(DEADLINE_S, _disconnect, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("scrape failed: %r", sys.exception())


class _Handler(WSGIRequestHandler):
    timeout = READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_authorized(environ: dict[str, Any], key: str) -> bool:
    scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    is_equal = hmac.compare_digest(given.strip().encode(), key.encode())
    return bool(scheme.lower() == "bearer" and is_equal)


def _error(start_response: Any, status: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [body]
