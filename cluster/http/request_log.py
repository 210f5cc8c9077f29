"""Request ids and the access log."""

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.clock import monotonic_s
from contracts.config import HttpConfig
from contracts.logs import ACCESS, Line, log_lines

log = logging.getLogger(ACCESS)

HEADER = b"x-request-id"
REQUEST_ID = "request_id"  # in scope["state"]
MAX_PATH_CHARACTERS = 200
WRITTEN_AFTER_S = 0.2
WRITTEN_LINES = 1000
_USABLE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

_bits = random.Random(secrets.randbits(256))  # not secret; faster than a system call each


def fresh_id() -> str:
    """Return a unique id: 32 hexadecimal digits."""
    return f"{_bits.getrandbits(128):032x}"


class AccessLog:
    """Buffer of the access log, on one event loop.

    Lines are written together, at most WRITTEN_AFTER_S after the first: single writes would take a
    twentieth of a small request's time.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, fields: dict[str, object]) -> None:
        self._lines.append((time.time(), "", fields))
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(WRITTEN_AFTER_S, self.write)
        elif len(self._lines) == WRITTEN_LINES:
            self.write()

    def write(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            log_lines(log, lines)


class RequestLog:
    """ASGI middleware, outside of the error handling.

    The log contains no text of a request: of the target only the path, percent-encoded as sent.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig, access_log: AccessLog | None) -> None:
        self._app = app
        self._exclude = frozenset(http.access_log_exclude)
        self._adds_header = http.front == "direct"  # Serve's proxy answers with the id
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        header = (HEADER, request_id.encode())
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        arrived_s = monotonic_s()
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._adds_header:
                    message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            if (
                self._access_log is not None
                and log.isEnabledFor(logging.INFO)
                and not (status < 400 and _route(scope) in self._exclude)
            ):
                spent_ms = 1e3 * (monotonic_s() - arrived_s)
                self._access_log.add(
                    {
                        "method": scope["method"],
                        "path": _path(scope),
                        "status": status,
                        "ms": round(spent_ms, 1),
                        "request_id": request_id,
                    }
                )


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id if it is usable in headers and logs, else a fresh one."""
    for name, value in headers:
        if name == HEADER:
            if _USABLE.fullmatch(value):
                return value.decode()
            break
    return fresh_id()


def _route(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _path(scope: Scope) -> str:
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw[: MAX_PATH_CHARACTERS + 1].decode("ascii", "backslashreplace")
    if len(path) > MAX_PATH_CHARACTERS:
        path = path[:MAX_PATH_CHARACTERS] + "..."
    return path if path.isprintable() else ascii(path)
