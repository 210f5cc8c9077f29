"""Frames of every socket between our processes but those of payloads: a 4-byte little-endian
length, then so many bytes of msgpack."""

from __future__ import annotations

import asyncio
import struct

import msgspec

# What a frame that cannot be decoded raises. msgspec gives up on a deeply nested one with Python's
# own RecursionError.
FRAME_ERRORS = (msgspec.MsgspecError, RecursionError)

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


def encode_frame(body: bytes) -> bytes:
    return _PREFIX.pack(len(body)) + body


def frame_size(prefix: bytes, max_bytes: int) -> int:
    """Of the frame that begins so. Raises msgspec.DecodeError unless it is 1 to `max_bytes`: what a
    peer says is believed only as far as there is memory for it."""
    size: int = _PREFIX.unpack(prefix)[0]
    if not 0 < size <= max_bytes:
        raise msgspec.DecodeError(f"a frame of {size} bytes, where 1 to {max_bytes} are accepted")
    return size


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """The body of the next frame. Raises msgspec.DecodeError, and what the reader raises."""
    return await reader.readexactly(frame_size(await reader.readexactly(PREFIX_BYTES), max_bytes))
