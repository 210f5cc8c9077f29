"""The ingress's own HTTP front: uvicorn in the replica's event loop.

Through Serve's proxy each streamed chunk is an item of a Ray generator (0.5 to 0.8 ms); here it is
a write to the client's socket. SO_REUSEPORT lets several replicas of one node share the port.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from contracts.config import HttpConfig
from contracts.errors import ResourceError

START_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 75  # uvicorn's 5 s is also when httpx drops an idle connection: they would race


class DirectFront:
    """Serves `app` as long as its replica lives. Serve runs the app's lifespan, not this."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._config = config
        settings = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=64 << 10,
        )
        self._server = uvicorn.Server(settings)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the port answers. Raises ResourceError if it is taken."""
        listener = bind(self._config.host, self._config.port, reuse_port=True)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.01)


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """A bound TCP socket. Raises ResourceError that names host, port and what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"http.host={host} http.port={port}: {error.strerror}; choose others (--host, --port)"
        ) from None
    return listener


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with bind("127.0.0.1", 0, reuse_port=False) as listener:
        port: int = listener.getsockname()[1]
    return port
