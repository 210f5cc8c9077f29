"""What a server answers a command: whole, but no more of it and no longer than is sound."""

from __future__ import annotations

import time
from typing import NamedTuple

import httpx
import msgspec

from cluster.files.server_url import bearer, no_answer
from contracts.errors import ConfigError


class Server(NamedTuple):
    url: str
    key: str | None = None


class Answer(NamedTuple):
    status: int
    body: bytes


def ask(
    server: Server,
    method: str,
    path: str,
    *,
    most_bytes: int,
    timeout_s: float,
    content: bytes | None = None,
) -> Answer:
    """content: JSON. timeout_s: for it to go on; in all it may take twice as long. Raises
    ConfigError where nobody answers, or without an end."""
    headers = bearer(server.key) | ({} if content is None else {"content-type": "application/json"})
    end_s = time.monotonic() + 2 * timeout_s
    try:
        with (
            httpx.Client(base_url=server.url, headers=headers, timeout=timeout_s) as client,
            client.stream(method, path, content=content) as response,
        ):
            return Answer(response.status_code, read_answer(response, most_bytes, end_s))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_answer(server.url, error) from None


def ask_watched(server: Server, path: str, *, most_bytes: int, timeout_s: float) -> Answer:
    """What whoever watches the server may see. Raises ConfigError, too where the key is another
    one."""
    answer = ask(server, "GET", path, most_bytes=most_bytes, timeout_s=timeout_s)
    if answer.status == 401:
        raise ConfigError(
            f"--url {server.url}: 401: give the key of its http.metrics_key as --api-key"
        )
    return answer


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
