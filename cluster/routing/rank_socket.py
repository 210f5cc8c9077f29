"""One connection to a rank, from the handshake until it is lost, with a watchdog.

A rank sends a message every STATE_PERIOD_S (a `RankState` if nothing else). A rank that is silent
for longer than `heartbeat_timeout_s` counts as hung, one whose connection closes as dead. On this
machine the timeout is four times as long, because the rank may wait for a core, and a third if its
process is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import msgspec

from actors.channels.handshake import Identity, initiate_async
from actors.channels.local_process import LocalProcess, find_process, is_hung
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerDeadError, PeerError, PeerHungError, TooCostlyError
from contracts.frames import FRAME_ERRORS, encode_frame, read_frame
from contracts.messages import MAX_FRAME_BYTES, Event, Events, ToRank

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
            for event in events.items:
                handle(event)

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
        """Send the buffer."""
        unsent, self._unsent = self._unsent, bytearray()
        if unsent:
            self._writer.write(unsent)


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        raise ChannelError(f"address {address!r}: expected unix:/path or tcp:host:port")
    return await asyncio.open_connection(host.strip("[]"), int(port))
