"""One HTTP/1.1 connection: uvicorn's protocol with bounds on what a client may send and how slowly.

    accepted ─ HEAD ─> request at work ─> IDLE ─> HEAD ─> ...           (see `WaitState`)
                        │         ├ READER: the answer is not read
                        │         └ HALF_CLOSED: FIN came before the answer's end
                        └ answered before its body is complete: REST

Bytes that complete neither a head nor a piece of a body (an incomplete head, chunk extensions,
trailers) are counted: beyond http.max_header_bytes they are a 431. uvicorn does not bound them.
"""

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.http.authenticator import PROVE
from cluster.http.connections import ConnectionTable, WaitState
from cluster.http.errors import (
    HeadersTooLargeError,
    HeadersTooSlowError,
    MalformedHttpError,
    TargetTooLongError,
    error_body,
)
from cluster.http.request_context import WATCH, fresh_id
from contracts.config import HttpConfig
from contracts.errors import TandemError

MAX_TARGET_BYTES = 4096  # routes are short; model names may be long
MAX_PIPELINED = 8  # requests behind the one at work
MAX_CHUNKS = 4096  # of a body; more must have MIN_CHUNK_BYTES on average
MIN_CHUNK_BYTES = 64
FRAMING = (b"content-length", b"transfer-encoding")
LINE_BYTES = 4  # ": " and the end of the line
MIN_READ_BYTES_PER_S = 1024  # a slower client is disconnected


class HttpProtocol(HttpToolsProtocol):
    """A connection, created on accept, before the TLS handshake.

    opening: the task that attaches it to its socket.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        connections: ConnectionTable,
        http: HttpConfig,
        address: str,
    ) -> None:
        super().__init__(config, server_state, app_state={})
        self.parser = self._new_parser()
        self.address = address
        self.wait: WaitState | None = None
        self.opening: asyncio.Task[None] | None = None
        self._connections = connections
        self._http = http
        self._is_open = not http.has_keys
        self._is_proven = False
        self._in_head = self._in_body = False
        self._has_served = False
        self._is_over = False  # stopped reading
        self._is_lost = False
        self._is_half_closed = self._is_probed = False
        self._running: Any = None  # the cycle at work; `cycle` is the last one of the pipeline
        self._is_advancing = False
        self._is_resuming = False  # a parser is reading the head that frames the body
        self._idle_bytes = 0  # that completed neither a head nor a piece of a body
        self._chunks = self._body_bytes = 0
        self._unsent_bytes = 0
        self._problem: TandemError | None = None
        self._on_disconnect: Callable[[], None] | None = None

    def _new_parser(self) -> httptools.HttpRequestParser:
        """Return a parser that accepts blanks behind a chunk's size, as nginx and h11 do."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(
            lenient_data_after_close=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    # Connection

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_over = self._is_lost = True
        self._connections.leave(self)
        self._watch(self._on_disconnect)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection: its client may await an answer (RFC 9112, 9.6).

        TLS has no half-closed connections in asyncio.
        """
        at_work = self.cycle is not None and not (self.cycle.response_complete or self._in_body)
        self._is_half_closed = at_work and not self._is_over and self.scheme == "http"
        if self._is_half_closed:
            self._stop_reading()
            self._update_wait()
        return self._is_half_closed

    def _check_half_closed(self) -> None:
        """Send bytes without effect, once: the kernel of a client that is gone resets them."""
        cycle = self._running
        line = self.transport.get_extra_info("socket")
        is_reset = line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if is_reset or cycle.scope["http_version"] == "1.0":  # it knows no interim answers
            self.drop()
        elif not self._is_probed:
            self._is_probed = True
            if cycle.chunked_encoding:
                self.transport.write(b"0")  # a leading zero of the next chunk's size
            elif not cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._is_advancing = False
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if self._problem is None and not self._is_over:
                self._problem = MalformedHttpError(f"not HTTP/1.1: {ascii(str(error))[1:-1]}")
        if self._is_advancing:
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > self._http.max_header_bytes:
                self._problem = self._problem or self._too_large(self._idle_bytes)
        if self._problem is not None and not self._is_over:
            self._refuse(self._problem)
        self._update_wait()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. An offered upgrade is ignored (RFC 9110, 7.8).

        The parser reads no body behind such a head, so another one continues: it first reads a head
        that only frames the body.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            framing = [
                b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in FRAMING
            ]
            self.parser = self._new_parser()
            self._is_resuming = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_wait()

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # asyncio's TLS transport cannot be closed twice
            super().shutdown()
        self._update_wait()

    # Parser

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        if len(self.pipeline) >= MAX_PIPELINED:  # each takes far more memory than its bytes
            self._stop_reading()
            raise RuntimeError("ends the parsing; those that wait are answered")
        super().on_message_begin()
        self.scope["state"].update({PROVE: self._prove, WATCH: self._watch})
        self._chunks = self._body_bytes = 0
        self._in_head = True

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            self._is_resuming = False
            return
        self._check_head()
        if not self.url.startswith((b"/", b"*")):
            self._use_origin_form()
        if self.parser.get_http_version() == "1.0":  # it knows no interim answers
            self.expect_100_continue = False
        super().on_headers_complete()
        self._is_advancing = self._in_body = True
        self._in_head = False
        self.headers = []  # of the trailers, which are ignored

    def on_chunk_header(self) -> None:
        if self._chunks > MAX_CHUNKS and self._body_bytes < self._chunks * MIN_CHUNK_BYTES:
            self._fail(
                MalformedHttpError(
                    f"the body has {self._chunks} chunks of {self._body_bytes} bytes in all: send "
                    f"chunks of at least {MIN_CHUNK_BYTES} bytes"
                )
            )
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        self._is_advancing = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the body follows
            return
        self._check_size(self.headers)
        self._is_advancing, self._in_body = True, False
        super().on_message_complete()
        if self._is_open:
            self._prove()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Continue as uvicorn does, without its timer: the table has all deadlines."""
        self.server_state.total_requests += 1
        self._has_served = True
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                cycle, app = self.pipeline.pop()
                self._start_asgi_task(cycle, app)
        self._update_wait()

    def _check_head(self) -> None:
        target_bytes = len(self.url)
        if target_bytes > MAX_TARGET_BYTES:
            self._fail(
                TargetTooLongError(
                    f"the request's target has {target_bytes} bytes, at most {MAX_TARGET_BYTES} "
                    "are accepted"
                )
            )
        self._check_size(self.headers, target_bytes)

    def _use_origin_form(self) -> None:
        """Reduce the target "http://host/path?query" to path and query."""
        _, found, rest = self.url.partition(b"://")
        if not found:
            self._fail(MalformedHttpError("the request's target is no path and no URL"))
        ends = [at for at in map(rest.find, (b"/", b"?")) if at >= 0]
        path = rest[min(ends) :] if ends else b""
        self.url = path if path.startswith(b"/") else b"/" + path

    def _check_size(self, headers: list[tuple[bytes, bytes]], more_bytes: int = 0) -> None:
        if not headers:
            return
        if len(headers) > self._http.max_headers:
            self._fail(
                HeadersTooLargeError(
                    f"the request has {len(headers)} headers, at most {self._http.max_headers} are "
                    "accepted (http.max_headers)"
                )
            )
        size = sum([len(name) + len(value) for name, value in headers])
        size += more_bytes + LINE_BYTES * len(headers)
        if size > self._http.max_header_bytes:
            self._fail(self._too_large(size))

    def _too_large(self, got_bytes: int) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            f"the headers have {got_bytes} bytes or more, at most {self._http.max_header_bytes} "
            "are accepted (http.max_header_bytes)"
        )

    def _fail(self, problem: TandemError) -> None:
        """Stop parsing and send an error."""
        self._problem = problem
        raise problem

    # Client deadlines

    def _prove(self) -> None:
        """Mark the connection proven: it sent a valid key, or a request where none is required."""
        if not self._is_proven:
            self._is_proven = True
            self._connections.prove(self)

    def _watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Set the callback for a client that disconnects during the request at work."""
        self._on_disconnect = on_disconnect
        if on_disconnect is not None and self._is_lost:
            self._on_disconnect = None
            self.loop.call_soon(on_disconnect)

    def _update_wait(self) -> None:
        """Report to the table what the connection waits for."""
        wait = self._current_wait()
        if wait is self.wait:
            return
        if wait is WaitState.IDLE:  # free the last request's head
            self.scope = self.headers = self.cycle = self._running = None  # type: ignore[assignment]
        if wait in (WaitState.READER, WaitState.CLOSING):
            self._unsent_bytes = self._count_unsent()
        self._connections.wait_for(self, wait)

    def _current_wait(self) -> WaitState | None:
        if self.flow.write_paused:
            return WaitState.READER
        if self.cycle is not None and not self.cycle.response_complete:
            if self.transport.is_closing():
                return WaitState.CLOSING
            return WaitState.HALF_CLOSED if self._is_half_closed else None
        if self._is_over or self.transport.is_closing():
            return WaitState.CLOSING
        if self._in_body:
            return WaitState.REST
        is_idle = self._has_served and not self._has_started
        return WaitState.IDLE if is_idle else WaitState.HEAD

    @property
    def _has_started(self) -> bool:
        """Return whether a part of a head has arrived."""
        return self._in_head or self._idle_bytes > 0

    def time_out(self, wait: WaitState, limit_s: float) -> None:
        if wait is WaitState.HEAD and self._has_started:
            self._refuse(
                HeadersTooSlowError(
                    f"the headers did not arrive within {limit_s:g} s (http.header_timeout_s)"
                )
            )
        elif wait in (WaitState.HEAD, WaitState.IDLE) and self.transport is not None:
            self.transport.close()
        elif wait is WaitState.HALF_CLOSED:
            self._check_half_closed()
        elif wait is WaitState.REST or not self._is_read_within(limit_s):
            self.drop()
            return
        self._update_wait()

    def _is_read_within(self, limit_s: float) -> bool:
        """Return whether the client has read enough of its answer since the last check."""
        if self.transport is None:
            return False
        left_bytes = self._count_unsent()
        return 0 < left_bytes <= self._unsent_bytes - MIN_READ_BYTES_PER_S * limit_s

    def _count_unsent(self) -> int:
        """Return the bytes that the client has not read, including the kernel's send buffer.

        The kernel requests more only when a third of its buffer of megabytes is free.
        """
        queued = bytearray(4)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        except (OSError, ValueError):  # closed: its descriptor is -1
            return 0
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def drop(self) -> None:
        self._is_over = True
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    # Answers of the protocol itself

    def _refuse(self, error: TandemError) -> None:
        """Send an error, in turn if possible, and stop reading."""
        cycle = self.cycle
        at_work = cycle is not None and not cycle.response_complete
        if not at_work and self._in_body:  # it is answered
            self._is_over = True
            self.transport.close()
        elif not at_work:
            self._answer(error)
        elif not self._in_body:  # an earlier request: answer it, then close
            self._stop_reading()
        elif self.pipeline or cycle.response_started:
            self.drop()
        else:
            self._answer(error)
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer(self, error: TandemError) -> None:
        self._is_over = True
        if self.transport.is_closing():
            return
        self.transport.write(refusal(error))
        # The client may still be sending: closing now would reset the connection and could lose
        # the answer. Send FIN, and discard what the client sends for a while.
        if self.scheme == "http" and self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # closed by the client
                self.transport.write_eof()
        else:
            self.transport.close()

    def _stop_reading(self) -> None:
        """Stop reading. The last pipelined request is answered with `Connection: close`."""
        self._is_over = True
        if self.cycle is not None:
            self.cycle.keep_alive = False


def refusal(error: TandemError, more: str = "") -> bytes:
    """Return a complete answer that closes the connection. more: further header lines."""
    body = msgspec.json.encode(error_body(error))
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{more}"
        f"x-request-id: {fresh_id()}\r\nconnection: close\r\n\r\n"
    )
    return STATUS_LINE[error.status] + head.encode() + body
