"""Length-prefixed frames."""

import asyncio

import msgspec
import pytest

from contracts.messages import FRAME_ERRORS, encode_frame, frame_size, read_frame


def read(data: bytes, max_bytes: int) -> bytes:
    async def run() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, max_bytes)

    return asyncio.run(run())


def test_frame_round_trips() -> None:
    assert encode_frame(b"abc") == b"\x03\0\0\0abc"
    assert read(encode_frame(b"abc") + b"next", 3) == b"abc"


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1])
def test_frame_above_the_limit_is_rejected_before_its_body_is_read(size: int) -> None:
    prefix = size.to_bytes(4, "little")
    with pytest.raises(msgspec.DecodeError, match=f"a frame of {size} bytes, where 1 to 3"):
        frame_size(prefix, 3)
    with pytest.raises(FRAME_ERRORS):
        read(prefix, 3)


def test_incomplete_frame_ends_the_stream() -> None:
    with pytest.raises(EOFError):
        read(encode_frame(b"abc")[:-1], 3)
