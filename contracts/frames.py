"""Frames of all sockets except payload links: a 4-byte little-endian length, then msgpack."""

from __future__ import annotations

import asyncio
import struct

import msgspec

# Raised for an invalid frame. msgspec raises RecursionError for a deeply nested one.
FRAME_ERRORS = (msgspec.MsgspecError, RecursionError)

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


def encode_frame(body: bytes) -> bytes:
    return _PREFIX.pack(len(body)) + body


def frame_size(prefix: bytes, max_bytes: int) -> int:
    """Return the size of a frame. Raises msgspec.DecodeError unless it is 1 to `max_bytes`."""
    size: int = _PREFIX.unpack(prefix)[0]
    if not 0 < size <= max_bytes:
        raise msgspec.DecodeError(f"a frame of {size} bytes, where 1 to {max_bytes} are accepted")
    return size


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return the body of the next frame. Raises msgspec.DecodeError and the reader's errors."""
    return await reader.readexactly(frame_size(await reader.readexactly(PREFIX_BYTES), max_bytes))
