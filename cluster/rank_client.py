"""The ingress's connection to one rank: submits sequences, hands out their events.

    submit ─> [Submit frame] ─────────────> rank
              [Events frame] <─────────────  one per step, for all sequences of this connection
    RankStream <─ its own events

A rank says something at least every half second (a `RankState` if nothing else). One that is silent
for longer than `silence_s` counts as hung, one whose connection closed as dead: in both cases every
waiting request fails at once with the rank's name, and the client goes on trying to reconnect.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import NoReturn

import msgspec

from actors.channels.handshake import Identity, initiate_async
from cluster.rank_stream import Listener, RankStream, Sink
from contracts.clock import Clock, monotonic_s
from contracts.errors import ChannelError, NotReadyError, PeerDeadError, PeerError, PeerHungError
from contracts.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Event,
    Events,
    RankState,
    Submit,
    Tokens,
    ToRank,
)
from contracts.routing import WorkerReport, WorkerSnapshot

PURPOSE = "requests"  # what we say in the handshake that this connection is for

_LOG = logging.getLogger("tandem.rank_client")
_WRITE_HIGH_WATER_BYTES = 1 << 20


class RankClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """silence_s: see above. stall_s: if our own event loop stood still for this long, the rank gets
    a fresh silence_s, because it was we who did not listen."""

    connect_timeout_s: float = 10.0
    silence_s: float = 2.0
    stall_s: float = 0.5
    check_every_s: float = 0.1
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class RankClient:
    """address: "unix:/path" or "tcp:host:port". me: this ingress, with the cluster's token.

    Belongs to one event loop; `start` before `submit`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        me: Identity,
        config: RankClientConfig = RankClientConfig(),  # noqa: B008  (frozen)
        clock: Clock = monotonic_s,
    ) -> None:
        self.name = name
        self.address = address
        self.state: RankState | None = None
        self.connections = 0  # how many there have been
        self._me = me
        self._config = config
        self._clock = clock
        self._writer: asyncio.StreamWriter | None = None
        self._sinks: dict[int, Sink] = {}
        self._listener: Listener | None = None
        self._ids = itertools.count(1)
        self.lost: ChannelError | None = None
        self._last_frame_s = 0.0
        self._changed = asyncio.Event()
        self._unsent = bytearray()
        self._broken: PeerError | None = None  # why we break the connection ourselves
        self._task: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Events)

    # ---- life

    def listen(self, listener: Listener) -> None:
        """Before `start`."""
        self._listener = listener

    def move(self, address: str) -> None:
        """The rank is now there: connects at once. Without effect if it was there before."""
        if address == self.address:
            return
        self.address, self._broken = address, None
        if self._task is not None:
            self._task.cancel()
            self._drop_all(PeerDeadError(f"{self.name} has been replaced", self.name))
            self._task = None
            self.start()

    def drop(self, reason: str) -> None:
        """Breaks the connection; the client then connects again."""
        if self._writer is not None:
            self._broken = PeerDeadError(f"{self.name}: {reason}", self.name)
            self._writer.transport.abort()

    def start(self) -> None:
        """Begins to connect, and to reconnect, in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name=f"client-{self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self._drop_all(ChannelError(f"{self.name}: this ingress is shutting down"))

    @property
    def problem(self) -> str | None:
        """Why this rank takes no requests now, or None."""
        if self._writer is None:
            return str(self.lost or f"{self.name} is not connected yet")
        if self.state is None:
            return f"{self.name} has not reported its state yet"
        if not self.state.healthy:
            return f"{self.name}: {self.state.reason or 'not healthy'}"
        return None

    async def wait_until(self, condition: Callable[[RankClient], bool]) -> None:
        """Returns once `condition` holds; asked whenever connection, state or log change."""
        while not condition(self):
            await self._changed.wait()

    # ---- requests

    async def submit(self, submit: Submit) -> RankStream:
        """Sends it under a request id of our own. Raises PeerError or NotReadyError."""
        stream = RankStream(self.name, next(self._ids), self.cancel)
        writer = self._post(submit, stream.request_id, stream)
        self._flush()
        try:
            await writer.drain()
        except OSError as error:
            self._sinks.pop(stream.request_id, None)
            raise self.lost or PeerDeadError(f"{self.name}: {error}", self.name) from None
        except BaseException:
            self.cancel(stream.request_id)
            raise
        return stream

    def post(self, submit: Submit, sink: Sink) -> int:
        """Sends it without waiting for a full socket: the caller bounds what is open. Returns the
        request id. Raises as `submit`."""
        request_id = next(self._ids)
        self._post(submit, request_id, sink)
        return request_id

    def _post(self, submit: Submit, request_id: int, sink: Sink) -> asyncio.StreamWriter:
        writer = self._writer
        if writer is None:
            raise self.lost or NotReadyError(f"{self.name} is not connected yet")
        self._sinks[request_id] = sink
        self._send(msgspec.structs.replace(submit, request_id=request_id))
        return writer

    def cancel(self, request_id: int) -> None:
        known = self._sinks.pop(request_id, None)
        if known is not None and self._writer is not None:
            self._send(Cancel(request_id))

    def _send(self, message: ToRank) -> None:
        """Goes out with all others of this turn of the event loop: one system call for them."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        body = self._encoder.encode(message)
        self._unsent += len(body).to_bytes(4, "little") + body

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and self._writer is not None:
            self._writer.write(unsent)

    # ---- connection

    async def _keep_connected(self) -> None:
        backoff_s = self._config.backoff_s
        while True:
            try:
                await self._connect_and_read()
            except ChannelError as error:
                lost: ChannelError = error
            except TimeoutError:
                lost = PeerHungError(
                    f"{self.name} at {self.address} did not answer within"
                    f" {self._config.connect_timeout_s:g} s",
                    self.name,
                )
            except (OSError, EOFError) as error:
                reason = str(error) or type(error).__name__
                lost = PeerDeadError(f"{self.name} at {self.address} is gone: {reason}", self.name)
            finally:
                was_connected = self._writer is not None
                self._writer = None
            if self._broken is not None:
                lost, self._broken = self._broken, None
            if str(self.lost) != str(lost):  # once, not with every attempt to reconnect
                _LOG.warning("rank_lost", extra={"rank": self.name, "reason": str(lost)})
            self._drop_all(lost)
            backoff_s = self._config.backoff_s if was_connected else backoff_s * 2
            await asyncio.sleep(min(backoff_s, self._config.max_backoff_s))

    async def _connect_and_read(self) -> NoReturn:
        """Runs until the connection is lost, which it reports by raising."""
        async with asyncio.timeout(self._config.connect_timeout_s):
            reader, writer = await _open(self.address)
            writer.transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
            try:
                await initiate_async(
                    reader,
                    writer,
                    self._me,
                    purpose=PURPOSE,
                    to=self.name,
                    deadline_s=self._config.connect_timeout_s,
                )
            except BaseException:
                writer.transport.abort()
                raise
        self._writer = writer
        self.connections += 1
        self._last_frame_s = self._clock()
        watchdog = asyncio.create_task(self._watch(writer), name=f"watch-{self.name}")
        try:
            self._announce()
            await self._read_frames(reader)
        except (OSError, EOFError):
            if watchdog.done():
                raise watchdog.result() from None
            raise
        finally:
            watchdog.cancel()
            writer.transport.abort()

    async def _read_frames(self, reader: asyncio.StreamReader) -> NoReturn:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            if size > MAX_FRAME_BYTES:
                raise PeerDeadError(f"{self.name} sent a frame of {size} bytes", self.name)
            body = await reader.readexactly(size)
            self._last_frame_s = self._clock()
            try:
                events = self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise PeerDeadError(
                    f"{self.name} sent a broken frame: {error}", self.name
                ) from None
            for event in events.items:
                self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RankState):
            self.state = event
            if self._listener is not None:
                self._listener.on_state(event)
            self._announce()
            return
        if isinstance(event, WorkerReport | WorkerSnapshot):
            if self._listener is not None:
                self._listener.on_log(event)
                if isinstance(event, WorkerSnapshot):
                    self._announce()
            return
        sink = self._sinks.get(event.request_id)
        if sink is None:
            return  # cancelled meanwhile
        if not isinstance(event, Tokens):
            del self._sinks[event.request_id]
        sink.put(event)

    async def _watch(self, writer: asyncio.StreamWriter) -> PeerError:
        """Breaks the connection when the rank has been silent for too long."""
        config = self._config
        while True:
            slept_from_s = self._clock()
            await asyncio.sleep(config.check_every_s)
            now_s = self._clock()
            if now_s - slept_from_s > config.stall_s + config.check_every_s:
                self._last_frame_s = now_s
            silent_s = now_s - self._last_frame_s
            if silent_s > config.silence_s:
                writer.transport.abort()
                return PeerHungError(f"{self.name} has been silent for {silent_s:.1f} s", self.name)

    def _drop_all(self, lost: ChannelError) -> None:
        """Ends every waiting request with an error that names the rank."""
        self.lost = lost
        self.state = None
        self._unsent.clear()
        sinks, self._sinks = self._sinks, {}
        if self._listener is not None:
            self._listener.on_lost(lost)
        for sink in sinks.values():
            sink.lose(lost)
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        raise ChannelError(f"address {address!r}: expected unix:/path or tcp:host:port")
    return await asyncio.open_connection(host.strip("[]"), int(port))
