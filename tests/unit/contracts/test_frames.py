"""Length-prefixed frames."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from contracts.frames import BAD_FRAME, body_bytes, framed, read_frame


def read(data: bytes, max_bytes: int) -> bytes:
    async def run() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, max_bytes)

    return asyncio.run(run())


def test_a_frame_is_read_as_it_was_written() -> None:
    assert framed(b"abc") == b"\x03\0\0\0abc"
    assert read(framed(b"abc") + b"next", 3) == b"abc"


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1])
def test_a_length_beyond_the_bound_is_refused_before_anything_is_read_of_it(size: int) -> None:
    prefix = size.to_bytes(4, "little")
    with pytest.raises(msgspec.DecodeError, match=f"a frame of {size} bytes, where 1 to 3"):
        body_bytes(prefix, 3)
    with pytest.raises(BAD_FRAME):
        read(prefix, 3)


def test_a_frame_that_breaks_off_is_the_end_of_its_stream() -> None:
    with pytest.raises(EOFError):
        read(framed(b"abc")[:-1], 3)
