"""The ingress's own HTTP front: uvicorn in the replica's event loop, behind sockets of our own.

Through Serve's proxy each streamed chunk is an item of a Ray generator (0.5 to 0.8 ms); here it is
a write to the client's socket. `front_listener` accepts, `front_protocol` bounds what a client may
send and how long it may take, `front_connections` says who goes when there is no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from cluster.http.connections import ConnectionTable, connection_limit, connection_timeouts
from cluster.http.errors import TooManyConnectionsError
from cluster.http.listener import HttpListener
from cluster.http.protocol import HttpProtocol, refusal
from contracts.config import LOOPBACK, HttpConfig
from contracts.errors import ConfigError, ResourceError
from contracts.logs import event

log = logging.getLogger("tandem.front")

START_TIMEOUT_S = 10.0
BIND_TIMEOUT_S = 8.0  # a replica that this one replaces may take a while to end
RETRY_AFTER_S = 1


class UvicornServer(uvicorn.Server):
    """uvicorn's server with listeners of our own."""

    def __init__(self, app: ASGIApp, http: HttpConfig, listening: socket.socket) -> None:
        settings = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing here depends on a client's address
            server_header=False,
            root_path=http.root_path,
            timeout_graceful_shutdown=2,
            ssl_certfile=http.tls_certificate,
            ssl_keyfile=http.tls_key,
        )
        super().__init__(settings)
        self._http = http
        self._listening = listening
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = connection_limit(self._http.max_connections, descriptors)
        clock = asyncio.get_running_loop().time
        self.connections = ConnectionTable(
            limit, self._http.max_connections_per_address, connection_timeouts(self._http), clock
        )
        self.servers = [
            HttpListener(  # type: ignore[list-item]
                self._listening,
                self.connections,
                functools.partial(
                    HttpProtocol, self.config, self.server_state, self.connections, self._http
                ),
                tls=self.config.ssl,
                handshake_s=self._http.header_timeout_s,
                refusal=functools.partial(_capacity_refusal, limit, is_tls=self.config.is_ssl),
            )
        ]
        self.started = True
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self.connections.sweep()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are for the process, not for its front


class HttpServer:
    """Serves `app` as long as its replica lives. Serve runs the app's lifespan, not this."""

    def __init__(self, app: ASGIApp, config: HttpConfig, *, shares_port: bool = False) -> None:
        """shares_port: others like it listen on the same port."""
        self._shares_port = shares_port
        self._app = app
        self._config = config
        self._server: UvicornServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the port answers. Raises ResourceError if it is taken, and stays so."""
        config = self._config
        is_shown = config.api_keys and config.metrics_key is None
        if is_shown and config.host not in LOOPBACK:
            hint = "/metrics, /load and /status need no key; set http.metrics_key"
            event(log, "metrics_unauthenticated", logging.WARNING, host=config.host, hint=hint)
        listening = await _bind_with_retry(config.host, config.port, self._shares_port)
        self.port: int = listening.getsockname()[1]
        self._server = UvicornServer(self._app, config, listening)
        self._task = asyncio.create_task(self._server.serve())
        started = asyncio.create_task(self._server.listening.wait())
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()

    def check(self) -> None:
        """Raises what ended it, though nobody asked it to."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise ResourceError(f"the HTTP front on port {self.port} has ended")

    async def close(self) -> None:
        """Ends it: requests at work have 2 s."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task


def check_public(http: HttpConfig) -> None:
    """Raises ConfigError where whoever reaches this machine could use the model, and nobody said
    that this is meant."""
    if http.host not in LOOPBACK and not http.has_keys and not http.allow_public:
        raise ConfigError(
            f"http.host={http.host} without http.api_keys: whoever reaches it could use the model; "
            "set keys (or TANDEM_API_KEY, or http.keys_file), or http.allow_public=true"
        )


def check_tls(http: HttpConfig) -> None:
    """Raises ConfigError if http.tls_certificate and http.tls_key cannot be used."""
    if http.tls_certificate is None or http.tls_key is None:
        return
    for name, path in (("tls_certificate", http.tls_certificate), ("tls_key", http.tls_key)):
        if not Path(path).is_file():
            raise ConfigError(f"http.{name}={path}: no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http.tls_certificate, http.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"http.tls_certificate={http.tls_certificate} with http.tls_key={http.tls_key}: "
            f"{getattr(error, 'reason', None) or error}; give PEM files that belong together"
        ) from None


async def _bind_with_retry(host: str, port: int, shares_port: bool) -> socket.socket:
    deadline_s = time.monotonic() + BIND_TIMEOUT_S
    while True:
        try:
            return bind(host, port, shares_port=shares_port)
        except ResourceError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(0.1)


def bind(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """A bound TCP socket, the only one of its port: whoever binds the same must listen elsewhere.
    shares_port: but for others of this user that share it too, among which Linux deals connections
    out. Raises ResourceError that names host, port and what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after an end, at once
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(1)  # two may bind one address as long as neither listens
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"http.host={host} http.port={port}: {error.strerror}; choose others (--host, --port)"
        ) from None
    return listener


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with bind("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


def _capacity_refusal(limit: int, *, is_tls: bool) -> bytes:
    """What a client is told that is one too many; nothing where only a handshake would do."""
    if is_tls:
        return b""
    error = TooManyConnectionsError(
        f"all {limit} connections are at work (http.max_connections): try again in "
        f"{RETRY_AFTER_S} s"
    )
    return refusal(error, more=f"retry-after: {RETRY_AFTER_S}\r\n")
