"""Requests of this process to its own application: rows of batches and of bulk jobs.

They pass the same checks as requests of clients and get the same answers. They need no key: their
caller is known. All are best effort.
"""

import asyncio
import itertools
from typing import Any, NamedTuple

import msgspec
from starlette.types import Message, Scope

from cluster.http.app import App
from cluster.http.errors import error_body
from cluster.http.request_context import CALLER, REQUEST_ID, WATCH
from cluster.http.response_types import ErrorDetail, ErrorResponse
from cluster.http.spans import TraceHeaders
from contracts.clock import monotonic_s
from contracts.errors import (
    NotReadyError,
    OverloadError,
    PeerDeadError,
    PeerHungError,
    RequestError,
    RequestTimeoutError,
)
from contracts.requests import Caller

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/classify", "/v1/score")
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
MAX_FAILURES = 3  # of a row: lost ranks, timeouts, errors of the server
LOST_CODES = frozenset({PeerDeadError.code, PeerHungError.code})
_BUSY = frozenset({OverloadError.status, NotReadyError.status})
_HEADERS = [(b"content-type", b"application/json")]


class RowReply(NamedTuple):
    """body: JSON, of an answer or an error. attempts: how often the row was sent."""

    status: int
    body: bytes
    attempts: int = 1

    @property
    def error(self) -> ErrorDetail:
        return _decode_error(self.body).error

    @property
    def is_busy(self) -> bool:
        """Return whether the server did not take the row: it lost no rank over it."""
        return self.status in _BUSY and self.error.code not in LOST_CODES


class _StreamField(msgspec.Struct):
    stream: Any = None


_decode_stream = msgspec.json.Decoder(_StreamField).decode
_decode_error = msgspec.json.Decoder(ErrorResponse).decode


class RowClient:
    """Client of `app`, on its event loop."""

    def __init__(self, app: App) -> None:
        self._endpoints = {path: app.pipelines[path] for path in ENDPOINTS}
        self._numbers = itertools.count(1)
        self._answered_s = monotonic_s()

    async def answer(
        self,
        path: str,
        body: bytes,
        caller: Caller,
        unavailable_s: float | None = None,
        trace: TraceHeaders = (),
    ) -> RowReply:
        """Send a row until it is answered or has failed `MAX_FAILURES` times.

        A busy server does not count as a failure, ranks that were lost over the row do. Raises
        NotReadyError once no row has been answered for unavailable_s. None: never. trace: headers
        of the trace that the row is part of.
        """
        if _is_stream(body):
            refused = RequestError("stream: not supported here: leave it out", "stream")
            return RowReply(refused.status, msgspec.json.encode(error_body(refused)))
        pause_s, failures = MIN_PAUSE_S, 0
        for attempts in itertools.count(1):
            status, text = await self._post(path, body, caller, trace)
            reply = RowReply(status, text, attempts)
            if status < 500 and status not in _BUSY:
                self._answered_s = monotonic_s()
                return reply
            failures += not reply.is_busy
            if failures >= MAX_FAILURES:
                return reply
            if unavailable_s is not None and monotonic_s() - self._answered_s > unavailable_s:
                raise NotReadyError(reply.error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise AssertionError("endless")

    async def _post(
        self, path: str, body: bytes, caller: Caller, trace: TraceHeaders
    ) -> tuple[int, bytes]:
        status, parts = RequestTimeoutError.status, list[bytes]()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # this client never disconnects
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        caller = msgspec.structs.replace(caller, request=next(self._numbers))
        state = {REQUEST_ID: caller.name, CALLER: caller, WATCH: lambda _: None}
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [*_HEADERS, *((name.encode(), value.encode()) for name, value in trace)],
            "state": state,
        }
        await self._endpoints[path](scope, receive, send)
        return status, b"".join(parts)


def _is_stream(body: bytes) -> bool:
    try:
        return bool(_decode_stream(body).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # reported by the endpoint
