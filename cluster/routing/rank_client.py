"""The ingress's connection to one rank: submits sequences and distributes their events.

    post ─> [Submit frame] ─────────────> rank
            [Events frame] <─────────────  one per step, for all sequences of this connection
    EventSink <─ its own events

When the rank is lost, hung or dead, or reports that its loop is stuck, every waiting request fails
at once with an error that names the rank. The client reconnects to a lost rank in the background.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from actors.channels.handshake import Identity, initiate_async
from actors.channels.local_process import LocalProcess, find_process, is_hung
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import (
    ChannelError,
    NotReadyError,
    PeerDeadError,
    PeerError,
    PeerHungError,
    TooCostlyError,
)
from contracts.logs import event
from contracts.messages import (
    FRAME_ERRORS,
    MAX_FRAME_BYTES,
    Cancel,
    Event,
    Events,
    RankState,
    SequenceEvent,
    Submit,
    Tokens,
    ToRank,
    encode_frame,
    read_frame,
)
from contracts.routing_messages import RequestKey, WorkerReport, WorkerSnapshot

PURPOSE = "requests"  # of the connection, in the handshake
# Built at import: msgspec crashes if two threads build the first decoder of a type at once.
_decode = msgspec.msgpack.Decoder(Events).decode


class RankClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a connection.

    heartbeat_timeout_s: see the module.
    stall_s: if this event loop stalls for longer, the timeout restarts: the ingress did not read.
    """

    connect_timeout_s: float = 10.0
    heartbeat_timeout_s: float = ChannelConfig().heartbeat_timeout_s
    stall_s: float = 0.5
    check_every_s: float = 0.1
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class RankSocket:
    """An open connection. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        config: RankClientConfig,
        clock: Clock,
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._config = config
        self._clock = clock
        self._last_frame_s = clock()
        self._local_process: LocalProcess | None = None  # if the rank is on this machine
        self._unsent = bytearray()
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def connect(
        cls, name: str, address: str, identity: Identity, config: RankClientConfig, clock: Clock
    ) -> RankSocket:
        """Connect to the rank `name`. Raises TimeoutError, OSError, EOFError or ChannelError."""
        async with asyncio.timeout(config.connect_timeout_s):
            reader, writer = await _open(address)
            try:
                remote = await initiate_async(
                    reader,
                    writer,
                    identity,
                    purpose=PURPOSE,
                    to=name,
                    deadline_s=config.connect_timeout_s,
                )
            except BaseException:
                writer.transport.abort()
                raise
        rank_socket = cls(name, reader, writer, config, clock)
        rank_socket._local_process = find_process(remote.extra)
        return rank_socket

    def send(self, message: ToRank) -> None:
        """Buffer a message. All messages of one turn of the event loop go out in one system call.

        Raises TooCostlyError if the message exceeds the size of a frame.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise TooCostlyError(
                f"a prompt of {len(body)} bytes is more than the {MAX_FRAME_BYTES} of one message"
                " between processes: shorten it"
            )
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent += encode_frame(body)

    def abort(self) -> None:
        self._unsent.clear()
        self._writer.transport.abort()
        if self._local_process is not None:
            self._local_process.close()

    async def receive(self, handle: Callable[[Event], None]) -> NoReturn:
        """Pass events to `handle` until the connection is lost. Raises as `connect` does."""
        watchdog = asyncio.create_task(self._watch(), name=f"watch-{self.name}")
        try:
            await self._read_frames(handle)
        except (OSError, EOFError):
            if watchdog.done():
                raise watchdog.result() from None
            raise
        finally:
            watchdog.cancel()
            self.abort()

    async def _read_frames(self, handle: Callable[[Event], None]) -> NoReturn:
        while True:
            try:
                body = await read_frame(self._reader, MAX_FRAME_BYTES)
                self._last_frame_s = self._clock()
                events = _decode(body)
            except FRAME_ERRORS as error:
                raise PeerDeadError(
                    f"{self.name} sent a broken frame: {error}", self.name
                ) from None
            for each in events.items:
                handle(each)

    async def _watch(self) -> PeerError:
        """Abort the connection when the rank is silent for too long."""
        config = self._config
        while True:
            slept_from_s = self._clock()
            await asyncio.sleep(config.check_every_s)
            now_s = self._clock()
            if now_s - slept_from_s > config.stall_s + config.check_every_s:
                self._last_frame_s = now_s
            silent_s = now_s - self._last_frame_s
            if is_hung(silent_s, config.heartbeat_timeout_s, self._local_process):
                self._writer.transport.abort()
                return PeerHungError(f"{self.name} has been silent for {silent_s:.1f} s", self.name)

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent:
            self._writer.write(unsent)


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        raise ChannelError(f"address {address!r}: expected tcp:host:port")
    return await asyncio.open_connection(host.strip("[]"), int(port))


_LOG = logging.getLogger("tandem.rank_client")


class EventSink(Protocol):
    """Receiver of the events of one request, on the client's event loop."""

    def put(self, event: SequenceEvent) -> None: ...

    def on_rank_lost(self, error: ChannelError) -> None:
        """Handle the loss of the rank before the end of the request. No event follows."""


class RankListener(Protocol):
    """Receiver of the state and the log of a rank."""

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None:
        """Handle a log entry: in order, before the answers that it belongs to.

        Raises ChannelError to reset the connection.
        """

    def on_state(self, state: RankState) -> None: ...

    def on_lost(self, error: ChannelError) -> None:
        """Handle a lost connection or a failed attempt. Called before `EventSink.on_rank_lost`."""


class RankClient:
    """Client of one rank, on one event loop. Call `start` before `post`.

    address: "tcp:host:port".
    identity: this ingress, with the cluster's token.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity,
        config: RankClientConfig = RankClientConfig(),  # noqa: B008  (frozen)
        clock: Clock = monotonic_s,
    ) -> None:
        self.name = name
        self.address = address
        self.state: RankState | None = None
        self.waits = False  # last reported, kept when it is lost: it waits for expert ranks
        self.connections = 0  # established so far
        self._identity = identity
        self._config = config
        self._clock = clock
        self._socket: RankSocket | None = None
        self._sinks: dict[int, EventSink] = {}
        self._listener: RankListener | None = None
        self._ids = itertools.count(1)
        self.last_error: ChannelError | None = None
        self._changed = asyncio.Event()
        self._reset_error: PeerError | None = None  # the reason of our own reset
        self._task: asyncio.Task[None] | None = None

    # ---- lifecycle

    def subscribe(self, listener: RankListener) -> None:
        """Set the listener. Call it before `start`."""
        self._listener = listener

    def set_address(self, address: str) -> None:
        """Reconnect to the rank at another address. No effect if the address is the same."""
        if address == self.address:
            return
        self.address, self._reset_error = address, None
        if self._stop("has been replaced"):
            self.start()

    def disconnect(self) -> None:
        """Stop connecting until the rank has an address again. Fails waiting requests."""
        self.address = ""
        self._stop("has ended")

    def _stop(self, reason: str) -> bool:
        """Stop connecting and fail waiting requests. Return whether the client was started."""
        task, self._task = self._task, None
        if task is None:
            return False
        task.cancel()
        self._fail_all(PeerDeadError(f"{self.name} {reason}", self.name))
        return True

    def reset_connection(self, reason: str) -> None:
        """Abort the connection. The client reconnects."""
        if self._socket is not None:
            self._reset_error = PeerDeadError(f"{self.name}: {reason}", self.name)
            self._socket.abort()

    def start(self) -> None:
        """Connect, and reconnect, in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name=f"client-{self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self._fail_all(ChannelError(f"{self.name}: this ingress is shutting down"))

    @property
    def problem(self) -> str | None:
        """The reason why the rank accepts no requests, or None."""
        if self._socket is None:
            return str(self.last_error or f"{self.name} is not connected yet")
        if self.state is None:
            return f"{self.name} has not reported its state yet"
        if not self.state.healthy:
            return f"{self.name}: {self.state.reason or 'not healthy'}"
        return f"{self.name} is leaving" if self.state.leaving else None

    @property
    def is_leaving(self) -> bool:
        """Return whether the rank has reported on this connection that it drains."""
        return self.state is not None and self.state.leaving

    @property
    def has_open(self) -> bool:
        """Return whether requests wait for events of the rank."""
        return bool(self._sinks)

    async def wait_until(self, condition: Callable[[RankClient], bool]) -> None:
        """Return once `condition` holds. Evaluated whenever connection, state or log change."""
        while not condition(self):
            await self._changed.wait()

    # ---- requests

    def post(
        self, submit: Submit, sink: EventSink, key: RequestKey | None = None, waited_s: float = 0.0
    ) -> int:
        """Send a request and return its id on this connection. Does not wait for a full socket.

        key: the router's key of the request.
        waited_s: time that the request has waited in this ingress.

        Raises PeerError, NotReadyError, or TooCostlyError if the message exceeds the size of a
        frame.
        """
        if self._socket is None:
            raise self.last_error or NotReadyError(f"{self.name} is not connected yet")
        request_id = next(self._ids)
        sent = msgspec.structs.replace(submit, request_id=request_id, key=key, waited_s=waited_s)
        self._socket.send(sent)
        self._sinks[request_id] = sink
        return request_id

    def flush(self) -> None:
        """Send buffered messages now instead of at the end of this turn of the event loop."""
        if self._socket is not None:
            self._socket.flush()

    def cancel(self, request_id: int) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None and self._socket is not None:
            self._socket.send(Cancel(request_id))

    # ---- connection

    async def _keep_connected(self) -> None:
        backoff_s = self._config.backoff_s
        while True:
            try:
                await self._connect_and_read()
            except ChannelError as error:
                last_error: ChannelError = error
            except TimeoutError:
                last_error = PeerHungError(
                    f"{self.name} at {self.address} did not answer within"
                    f" {self._config.connect_timeout_s:g} s",
                    self.name,
                )
            except (OSError, EOFError) as error:
                reason = str(error) or type(error).__name__
                last_error = PeerDeadError(
                    f"{self.name} at {self.address} is gone: {reason}", self.name
                )
            finally:
                was_connected = self._socket is not None
                self._socket = None
            if self._reset_error is not None:
                last_error, self._reset_error = self._reset_error, None
            if str(self.last_error) != str(last_error):  # log once, not for every attempt
                event(_LOG, "rank_lost", logging.WARNING, rank=self.name, reason=last_error)
            self._fail_all(last_error)
            backoff_s = self._config.backoff_s if was_connected else backoff_s * 2
            await asyncio.sleep(min(backoff_s, self._config.max_backoff_s))

    async def _connect_and_read(self) -> NoReturn:
        """Run until the connection is lost, then raise the reason."""
        self._socket = await RankSocket.connect(
            self.name, self.address, self._identity, self._config, self._clock
        )
        self.connections += 1
        self._notify_changed()
        await self._socket.receive(self._handle)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RankState):
            self.state, self.waits = event, event.waits
            if self._listener is not None:
                self._listener.on_state(event)
            if event.stuck:
                self._fail_hung(PeerHungError(event.reason, self.name))
            self._notify_changed()
            return
        if isinstance(event, WorkerReport | WorkerSnapshot):
            if self._listener is not None:
                self._listener.on_log(event)
                if isinstance(event, WorkerSnapshot):
                    self._notify_changed()
            return
        sink = self._sinks.get(event.request_id)
        if sink is None:
            return  # cancelled
        if not isinstance(event, Tokens):
            del self._sinks[event.request_id]
        sink.put(event)

    def _fail_hung(self, error: PeerHungError) -> None:
        """Fail and cancel every waiting request: the rank may recover, but need not answer them."""
        for request_id, sink in list(self._sinks.items()):
            self.cancel(request_id)
            sink.on_rank_lost(error)

    def _fail_all(self, last_error: ChannelError) -> None:
        self.last_error = last_error
        self.state = None
        sinks, self._sinks = self._sinks, {}
        if self._listener is not None:
            self._listener.on_lost(last_error)
        for sink in sinks.values():
            sink.on_rank_lost(last_error)
        self._notify_changed()

    def _notify_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
