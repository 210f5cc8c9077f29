"""Authenticated connections on an asyncio loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from actors.channels.handshake import AcceptHandler, Identity, Remote
from actors.channels.listener import HandshakeListener, listen_tcp
from contracts.clock import monotonic_s

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
