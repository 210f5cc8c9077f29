"""Length-prefixed frames."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from contracts.frames import FRAME_ERRORS, encode_frame, frame_size, read_frame


def read(data: bytes, max_bytes: int) -> bytes:
    async def run() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, max_bytes)

    return asyncio.run(run())


def test_a_frame_is_read_as_it_was_written() -> None:
    assert encode_frame(b"abc") == b"\x03\0\0\0abc"
    assert read(encode_frame(b"abc") + b"next", 3) == b"abc"


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1])
def test_a_length_beyond_the_bound_is_refused_before_anything_is_read_of_it(size: int) -> None:
    prefix = size.to_bytes(4, "little")
    with pytest.raises(msgspec.DecodeError, match=f"a frame of {size} bytes, where 1 to 3"):
        frame_size(prefix, 3)
    with pytest.raises(FRAME_ERRORS):
        read(prefix, 3)


def test_a_frame_that_breaks_off_is_the_end_of_its_stream() -> None:
    with pytest.raises(EOFError):
        read(encode_frame(b"abc")[:-1], 3)
