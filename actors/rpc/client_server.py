"""Servers of authenticated connections, and that of the clients of an attention rank.

Clients send requests and receive answers.
An asyncio loop on its own thread receives messages, and sends what a socket does not take at once,
so that a slow client never delays a layer.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from actors.channels.handshake import AcceptHandler, Identity, Remote
from actors.channels.heartbeat import LoopWatchdog
from actors.channels.listener import HandshakeListener, listen_tcp
from actors.channels.local_process import own_identity
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, TooCostlyError
from contracts.logs import event
from contracts.messages import (
    FRAME_ERRORS,
    MAX_FRAME_BYTES,
    STATE_PERIOD_S,
    Event,
    Events,
    Failed,
    RankState,
    ToRank,
    encode_frame,
    read_frame,
)
from contracts.routing_messages import WorkerReport, WorkerSnapshot

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Remote], Awaitable[None]]


class AuthenticatedServer:
    """Serves peers that prove the cluster's token. `serve` handles one connection."""

    def __init__(
        self, me: Identity, *, serve: ConnectionHandler, answer: AcceptHandler = lambda remote: b""
    ) -> None:
        self._me, self._serve, self._answer = me, serve, answer
        self._listener: HandshakeListener | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter | None] = {}

    def open(self, host: str) -> str:
        """Start accepting on a free port and return the address. Raises ChannelError."""
        loop = asyncio.get_running_loop()
        sock, address = listen_tcp(host)

        def on_accepted(accepted: socket.socket, remote: Remote) -> None:
            loop.call_soon_threadsafe(self._start, accepted, remote)

        self._listener = HandshakeListener(
            sock, self._me, answer=self._answer, accepted=on_accepted
        )
        return address

    async def close(self, deadline_s: float) -> None:
        """Stop accepting, and end connections when their buffers are sent or at deadline_s."""
        if self._listener is None:
            return
        end_s = monotonic_s() + deadline_s
        self._listener.close(deadline_s)  # handshakes under way end at once
        await asyncio.sleep(0)  # connections handed over before
        for writer in self._open.values():
            if writer is not None:
                writer.close()
        if self._open:
            left_s = max(end_s - monotonic_s(), 0.0)
            _, late = await asyncio.wait(list(self._open), timeout=left_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=deadline_s)

    def _start(self, sock: socket.socket, remote: Remote) -> None:
        task = asyncio.create_task(self._handle(sock, remote))
        self._open[task] = None
        task.add_done_callback(self._open.pop)

    async def _handle(self, sock: socket.socket, remote: Remote) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):  # OSError: disconnected
                raise
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            await self._serve(reader, writer, remote)
        finally:
            writer.close()


log = logging.getLogger("tandem.client_server")

STOP_DEADLINE_S = 2.0
MAX_BUFFERED_BYTES = 64 << 20  # a client that reads nothing is cut off beyond this
_decode = msgspec.msgpack.Decoder(ToRank).decode
_encoder = msgspec.msgpack.Encoder()


class ClientJoined(NamedTuple):
    """First message of every client."""


class ClientMessage(NamedTuple):
    """A message from a client; None: the client disconnected."""

    client: int
    message: ToRank | ClientJoined | None


class _Client:
    """A connected client. Its frames are sent at once, unless earlier ones wait.

    Waking the I/O thread for each frame would take longer than the system call.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._socket: socket.socket = writer.get_extra_info("socket").dup()
        self._lock = threading.Lock()
        self._queued, self._is_buffered = 0, False  # parts for `write`, and in the transport

    def send(self, frame: bytes) -> bytes:
        """Send a frame, and return the part that is left for `write`. Thread-safe."""
        with self._lock:
            if not self._queued and not self._is_buffered:
                with contextlib.suppress(OSError):  # full, or closed, as the reader will notice
                    frame = frame[self._socket.send(frame) :]
            self._queued += bool(frame)
        return frame

    def write(self, part: bytes) -> None:
        transport = self._writer.transport
        with self._lock:
            if transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
                transport.abort()
            if not transport.is_closing():
                self._writer.write(part)
                self._queued -= 1
                self._is_buffered = transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        self._writer.transport.abort()

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class ClientServer:
    """Serves authenticated clients. `wake` runs after each message; heartbeats check `watch`."""

    def __init__(
        self, name: str, *, token: bytes, wake: Callable[[], None], watch: LoopWatchdog
    ) -> None:
        # Clients are not bound to an epoch: they stay while the group restarts.
        self._identity = Identity(name=name, token=token, epoch=None)
        self._wake = wake
        self._watch = watch
        self._inbox: deque[ClientMessage] = deque()
        self._connected: dict[int, _Client] = {}
        self._next_client = 0
        self._state: RankState | None = None
        self._sending_state = threading.Lock()
        self._loop = asyncio.new_event_loop()
        process_identity = own_identity()  # lets a local client see that we only wait for a core
        self._server = AuthenticatedServer(
            self._identity, serve=self._serve, answer=lambda _: process_identity
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"{name}-clients", daemon=True
        )

    def listen(self, host: str, *, deadline_s: float) -> str:
        """Start accepting. Returns "tcp:host:port"."""
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop)
        return started.result(deadline_s)

    def receive(self) -> list[ClientMessage]:
        """Return the messages since the last call, in order per client."""
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def send(self, client: int, events: Events) -> None:
        """Send events, in order, as one or more frames; dropped if the client is gone."""
        try:
            frames = event_frames(events.items, MAX_FRAME_BYTES)
        except ChannelError as error:
            event(log, "client_dropped", logging.ERROR, client=client, reason=error)
            self._call(self._drop, client)
            return
        for frame in frames:
            self._send_frame(client, frame)

    def publish(self, state: RankState) -> None:
        """Set the state that clients receive: now if health or draining changed, else later.

        The I/O thread sends heartbeats, so a rank in a long attention task is not silent. Once its
        loop counts as stalled, they report that.
        """
        before, self._state = self._state, state
        if before is None or _urgent_state(before) != _urgent_state(state):
            self._send_state()  # before later events

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5.0)
            self._call(self._loop.stop)
            self._thread.join(5.0)
        self._loop.close()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def _listen(self, host: str) -> str:
        address = self._server.open(host)
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats())
        return address

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(STATE_PERIOD_S)
            self._watch.check()
            self._send_state()

    def _send_state(self) -> None:
        with self._sending_state:  # heartbeats do not send an earlier one afterwards
            if self._state is not None:
                frame = self._state_frame(self._state)
                for client in list(self._connected):
                    self._send_frame(client, frame)

    def _state_frame(self, state: RankState) -> bytes:
        problem = self._watch.problem
        if problem:
            state = msgspec.structs.replace(state, healthy=False, reason=problem, stuck=True)
        (frame,) = event_frames([state])
        return frame

    async def _stop(self) -> None:
        self._heartbeat_task.cancel()
        await self._server.close(STOP_DEADLINE_S)  # after queued answers

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: Remote
    ) -> None:
        """Forward a client's messages until its connection ends."""
        client, self._next_client = self._next_client, self._next_client + 1
        connected = self._connected[client] = _Client(writer)
        with self._sending_state:
            if self._state is not None:
                self._send_frame(client, self._state_frame(self._state))
        self._put(client, ClientJoined())
        try:
            while True:
                body = await read_frame(reader, MAX_FRAME_BYTES)
                self._put(client, _decode(body))
        except (OSError, EOFError, *FRAME_ERRORS):
            pass  # a broken connection or a malformed frame
        finally:
            del self._connected[client]
            connected.close()
            self._put(client, None)

    def _put(self, client: int, message: ToRank | ClientJoined | None) -> None:
        self._inbox.append(ClientMessage(client, message))
        self._wake()

    def _drop(self, client: int) -> None:
        connected = self._connected.get(client)
        if connected is not None:
            connected.abort()

    def _send_frame(self, client: int, frame: bytes) -> None:
        connected = self._connected.get(client)
        if connected is not None and (part := connected.send(frame)):
            self._call(connected.write, part)


def _urgent_state(state: RankState) -> tuple[bool, bool]:
    """Return the fields whose changes are sent at once."""
    return state.healthy, state.leaving


def event_frames(events: Sequence[Event], max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Encode `events` in order, as one frame if it is small enough, else as several.

    An answer that is too large by itself becomes a `Failed` of its request. Raises ChannelError for
    a worker's log entry that is too large: the log is useless without it.
    """
    body = _encoder.encode(Events(list(events)))
    if len(body) <= max_bytes:
        return [encode_frame(body)]
    if len(events) == 1:
        return event_frames([_failed(events[0], len(body), max_bytes)], max_bytes)
    half = len(events) // 2  # each event is encoded at most log2(len(events)) times
    return [*event_frames(events[:half], max_bytes), *event_frames(events[half:], max_bytes)]


def _failed(item: Event, size: int, max_bytes: int) -> Failed:
    problem = (
        f"an answer of {size} bytes is more than the {max_bytes} of one message between processes"
    )
    if isinstance(item, RankState | WorkerReport | WorkerSnapshot | Failed):
        raise ChannelError(f"{type(item).__name__}: {problem}")
    error = TooCostlyError(f"{problem}: ask for fewer logprobs, or a shorter prompt", None)
    return Failed(item.request_id, error.code, error.message, error.status)
