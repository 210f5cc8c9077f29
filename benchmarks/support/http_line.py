"""A keep-alive HTTP connection that costs its user next to nothing (httpx takes about 1 ms a
request), so that what is measured through it is the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator


class HttpLine:
    """One request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> HttpLine:
        return cls(*await asyncio.open_connection(host, port))

    @property
    def is_closed(self) -> bool:
        """Whether the server has ended it, as servers do with idle connections."""
        return self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer's body. Raises RuntimeError unless it is a 200."""
        headers = await self._send(path, body)
        return await self._reader.readexactly(int(headers["content-length"]))

    async def stream(self, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        """Each chunk of the answer, and when it had arrived. Raises as `post` does."""
        await self._send(path, body)
        while size := int(await self._reader.readline(), 16):
            chunk = await self._reader.readexactly(size + 2)
            yield time.perf_counter(), chunk[:-2]
        await self._reader.readexactly(2)

    async def _send(self, path: str, body: bytes) -> dict[str, str]:
        """The headers of the answer, their names in lower case."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        if " 200 " not in f"{status} ":
            raise RuntimeError(f"{path}: {status}")
        pairs = (line.partition(":") for line in lines if line)
        return {name.lower(): value.strip() for name, _, value in pairs}
