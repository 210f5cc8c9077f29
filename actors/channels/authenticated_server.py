"""A listening socket on an asyncio loop for peers that prove the cluster's token.

The counterpart of `listener.HandshakeListener`, with the same `PendingHandshakes` limits.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from actors.channels import pending_handshakes
from actors.channels.handshake import AcceptHandler, Identity, Remote, accept_async
from actors.channels.listener import listen_tcp
from actors.channels.pending_handshakes import PendingHandshakes, address_of, shut_down
from contracts.errors import HandshakeError

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Remote], Awaitable[None]]


class AuthenticatedServer:
    """Call `open` and `close` on the loop that serves.

    serve: handles one connection, which is closed when it returns.
    """

    def __init__(
        self, me: Identity, *, serve: ConnectionHandler, answer: AcceptHandler | None = None
    ) -> None:
        self._me, self._serve, self._answer = me, serve, answer
        self._pending = PendingHandshakes(me.name)
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter | None] = {}

    def open(self, host: str) -> str:
        """Start accepting on a free port of `host` and return the address. Raises ChannelError."""
        self._sock, address = listen_tcp(host)
        self._sock.setblocking(False)
        self._accepting = asyncio.create_task(
            self._accept(self._sock), name=f"{self._me.name}-server"
        )
        return address

    async def close(self, deadline_s: float) -> None:
        """Stop accepting and end all connections once their buffers are sent.

        Connections still open after deadline_s are cancelled.
        """
        if self._sock is None or self._accepting is None:
            return
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._sock.close()
        for writer in self._open.values():
            if writer is not None:
                writer.close()
        if self._open:
            _, late = await asyncio.wait(list(self._open), timeout=deadline_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=deadline_s)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors or memory: do not spin
                self._pending.log_limited("accept_failed", str(error))
                await asyncio.sleep(pending_handshakes.ACCEPT_RETRY_S)
                continue
            try:
                number = self._pending.enter(address_of(sock), partial(shut_down, sock))
            except OSError:  # disconnected
                sock.close()
                continue
            task = asyncio.create_task(self._handle(sock, number))
            self._open[task] = None
            task.add_done_callback(self._open.pop)
            await asyncio.sleep(0)  # accepted connections get a turn, however many arrive

    async def _handle(self, sock: socket.socket, number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException as error:
            self._pending.leave(number)
            sock.close()
            if not isinstance(error, OSError):  # OSError: disconnected
                raise
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            remote = await self._authenticate(number, reader, writer)
            if remote is not None:
                await self._serve(reader, writer, remote)
        finally:
            writer.close()

    async def _authenticate(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Remote | None:
        """Return the peer, or None if it is refused or evicted."""
        try:
            remote = await accept_async(
                reader,
                writer,
                self._me,
                answer=self._answer,
                deadline_s=pending_handshakes.HANDSHAKE_S,
                first_byte_s=pending_handshakes.FIRST_BYTE_S,
            )
        except HandshakeError as error:
            self._pending.leave(number)
            self._pending.log_limited("handshake_refused", str(error))
            return None
        except BaseException:
            self._pending.leave(number)
            raise
        return remote if self._pending.leave(number) else None
