"""The ingress's own HTTP server: uvicorn's protocol in the replica's event loop.

Through Serve's proxy each streamed chunk is an item of a Ray generator (0.5 to 0.8 ms); here it is
a write to the client's socket. `protocol.py` bounds what a client may send and how slowly,
`connections.py` decides which connection closes when there is no room.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import random
import resource
import socket
import ssl
import time
from email.utils import formatdate
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from cluster.http.connections import ConnectionTable, connection_limit
from cluster.http.errors import TooManyConnectionsError
from cluster.http.protocol import HttpProtocol, refusal
from contracts.config import LOOPBACK, HttpConfig
from contracts.errors import ConfigError, ResourceError
from contracts.logs import event

log = logging.getLogger("tandem.front")

BIND_TIMEOUT_S = 8.0  # a replaced replica may still be ending
RETRY_AFTER_S = 1
ACCEPTS_PER_TURN = 64  # then the event loop continues
BACKLOG = 2048
PAUSE_S = 0.5
TICK_S = 0.1
DATE_TICKS = 10
TLS_CHECK_TICKS = 100  # between checks for a renewed certificate
STOP_S = 2.0
STOP_POLL_S = 0.01
_UNASSIGNED_PORTS = range(20_000, 32_768)  # above those of Ray's workers, below the ephemeral ones


class HttpServer:
    """uvicorn's protocol behind our own listener, while its replica lives.

    Serve, not this server, runs the app's lifespan. shares_port: servers of other replicas listen
    on the same port.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig, *, shares_port: bool = False) -> None:
        self.config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # client addresses are not used
            root_path=http.root_path,
            ssl_certfile=http.tls_certificate,
            ssl_keyfile=http.tls_key,
        )
        self.state = ServerState()
        self.http = http
        self._shares_port = shares_port
        self._tls_files = tls_files(http)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once the port answers. Raises ResourceError if it stays in use."""
        http = self.http
        if http.api_keys and http.metrics_key is None and http.host not in LOOPBACK:
            hint = "/metrics, /load and /status need no key; set http.metrics_key"
            event(log, "metrics_unauthenticated", logging.WARNING, host=http.host, hint=hint)
        listening = await _bind_with_retry(http.host, http.port, self._shares_port)
        self.port: int = listening.getsockname()[1]
        self.config.load()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = connection_limit(http.max_connections, descriptors)
        self.connections = ConnectionTable(limit, http, asyncio.get_running_loop().time)
        self._ticking = asyncio.create_task(self._tick_regularly())
        await asyncio.sleep(0)  # the first tick sets the date
        self._listener = HttpListener(self, listening)

    def check(self) -> None:
        """Raise the error that ended the ticks, if there is one."""
        if self._ticking is not None and self._ticking.done():
            self._ticking.result()

    async def close(self) -> None:
        """Stop the server. Requests at work have STOP_S."""
        if self._ticking is None:
            return
        self._listener.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self.state.connections or self.state.tasks:
                    await asyncio.sleep(STOP_POLL_S)
        for task in (*self.state.tasks, self._ticking):
            task.cancel()
        self._ticking = None

    async def _tick_regularly(self) -> None:
        """Sweep the connections. Renew the answers' date and the certificate."""
        for tick in itertools.count():
            if tick % DATE_TICKS == 0:
                self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            self.connections.sweep()
            if tick % TLS_CHECK_TICKS == 0 and self.config.ssl is not None:
                await asyncio.to_thread(self._reload_certificate, self.config.ssl)
            await asyncio.sleep(TICK_S)

    def _reload_certificate(self, context: ssl.SSLContext) -> None:
        """Use renewed TLS files for new connections. Files that cannot be used change nothing."""
        http, previous = self.http, self._tls_files
        try:
            self._tls_files = tls_files(http)
            if self._tls_files == previous:
                return
            check_tls(http)
            context.load_cert_chain(str(http.tls_certificate), http.tls_key)
        except (ConfigError, OSError) as error:
            event(log, "certificate_rejected", logging.ERROR, reason=f"{error}; the old one stays")
        else:
            event(log, "certificate_reloaded", path=http.tls_certificate)


def check_public(http: HttpConfig) -> None:
    """Raise ConfigError if a public server has no keys and http.open is not set."""
    if http.host not in LOOPBACK and not http.has_keys and not http.allow_public:
        raise ConfigError(
            f"http.host={http.host} without http.api_keys: anyone who reaches it can use it; "
            "set keys (or TANDEM_API_KEY, or http.keys_file), or http.allow_public=true"
        )


def tls_files(http: HttpConfig) -> list[bytes]:
    """Return the contents of the certificate and its key; empty without TLS or a file."""
    paths = [Path(path) for path in (http.tls_certificate, http.tls_key) if path]
    return [path.read_bytes() if path.is_file() else b"" for path in paths]


def check_tls(http: HttpConfig) -> None:
    """Raise ConfigError if http.tls_certificate and http.tls_key cannot be used."""
    if http.tls_certificate is None or http.tls_key is None:
        return
    for name, path in (("tls_certificate", http.tls_certificate), ("tls_key", http.tls_key)):
        if not Path(path).is_file():
            raise ConfigError(f"http.{name}={path}: no such file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(http.tls_certificate, http.tls_key, _refuse_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"http.tls_certificate={http.tls_certificate} with http.tls_key={http.tls_key}: "
            f"{getattr(error, 'reason', None) or error}; give PEM files that belong together"
        ) from None


def _refuse_passphrase() -> str:
    """Raise ConfigError, as the answer to OpenSSL, which would ask at the terminal."""
    raise ConfigError(
        "http.tls_key (--ssl-keyfile) is encrypted with a passphrase: give a key without one "
        "(openssl pkey -in KEY -out NEW_KEY) that only this user can read"
    )


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
    """Return a bound TCP socket that owns its port. Raises ResourceError.

    shares_port: other processes of this user may share it; Linux distributes the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only where it is given.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allow a restart at once
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(1)  # two sockets may bind one address until one listens
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"http.host={host} http.port={port}: {error.strerror}; choose others (--host, --port)"
        ) from None
    return listener


def free_port() -> int:
    """Return an unused loopback port that neither Linux nor Ray assigns to another socket.

    Raises ResourceError.
    """
    tried = random.SystemRandom().sample(_UNASSIGNED_PORTS, 50)
    for port in tried:
        with contextlib.suppress(ResourceError), bind("127.0.0.1", port):
            return port
    raise ResourceError(f"127.0.0.1: none of {len(tried)} ports that were tried can be bound")


OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class HttpListener:
    """Accepts the connections of one socket.

    The event loop's own server admits all clients, does not count them before the TLS handshake
    ends, and without free descriptors spins (asyncio) or silently drops clients (uvloop).
    """

    def __init__(self, server: HttpServer, listening: socket.socket) -> None:
        self._server, self._listening = server, listening
        self._connections = server.connections
        self._tls = server.config.ssl
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._pause_accepting(error)
                    return
                continue  # closed by the client
            sock.setblocking(False)
            self._admit(sock, str(address[0]) if address else "")

    def _pause_accepting(self, error: OSError) -> None:
        """Pause while the process has no free descriptors. One idle connection closes."""
        self._connections.make_room()
        event(
            log,
            "accept_failed",
            logging.WARNING,
            error=error.strerror,
            open=len(self._connections),
            hint="lower http.max_connections, or raise ulimit -n",
        )
        self._loop.remove_reader(self._listening.fileno())
        self._pause = self._loop.call_later(
            PAUSE_S, self._loop.add_reader, self._listening.fileno(), self._accept
        )

    def _admit(self, sock: socket.socket, address: str) -> None:
        server = self._server
        protocol = HttpProtocol(
            server.config, server.state, self._connections, server.http, address
        )
        if not self._connections.admit(protocol):
            with contextlib.suppress(OSError):
                if self._tls is None:
                    sock.send(self._refusal())
                sock.shutdown(socket.SHUT_WR)
            sock.close()
            return
        opening = self._loop.create_task(self._open(sock, protocol))
        protocol.opening = opening
        # Not in the task itself: a task that is cancelled before it starts runs no code.
        opening.add_done_callback(functools.partial(self._opened, sock, protocol))

    def _refusal(self) -> bytes:
        error = TooManyConnectionsError(
            f"all {self._connections.limit} connections are at work (http.max_connections): try "
            f"again in {RETRY_AFTER_S} s"
        )
        return refusal(error, more=f"retry-after: {RETRY_AFTER_S}\r\n")

    async def _open(self, sock: socket.socket, protocol: HttpProtocol) -> None:
        """Attach the socket to the protocol, which then owns it; with TLS after the handshake."""
        limit_s = self._server.http.header_timeout_s
        more = {} if self._tls is None else {"ssl_handshake_timeout": limit_s}
        await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls, **more)

    def _opened(
        self, sock: socket.socket, protocol: HttpProtocol, opening: asyncio.Task[None]
    ) -> None:
        protocol.opening = None
        error = None if opening.cancelled() else opening.exception()
        if error is None and not opening.cancelled():
            return
        sock.close()
        self._connections.leave(protocol)
        if error is not None and not isinstance(error, OSError):  # OSError: a failed handshake
            event(log, "connection_setup_failed", logging.ERROR, error)
