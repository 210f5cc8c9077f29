"""What a server answers a command: whole, but no more of it and no longer than is sound."""

from __future__ import annotations

import time

import httpx
import msgspec


def read_answer(response: httpx.Response, most_bytes: int, end_s: float) -> bytes:
    """The body of one that is streamed. Raises httpx.ReadTimeout where it does not end by then, on
    the monotonic clock, or is longer."""
    parts, size = list[bytes](), 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > most_bytes or time.monotonic() > end_s:
            raise httpx.ReadTimeout(f"its answer has no end after {size} bytes")
    return b"".join(parts)


def message_of(body: bytes) -> str:
    """Of an error's answer, in one line."""
    try:
        told = msgspec.json.decode(body, type=dict[str, dict[str, str | None]])
        return str(told["error"]["message"])
    except (msgspec.DecodeError, KeyError, RecursionError):
        return " ".join(body[:200].decode("utf-8", "replace").split()) or "no answer"
