"""What the endpoints' answers share: identity, usage, choices collected from their deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.classification.classify import add_usage
from cluster.http.memory_budget import MemoryAccount
from cluster.http.request_log import fresh_id
from cluster.http.response_types import PromptTokensDetails, TokenUsage
from cluster.http.text import Delta, ShownToken
from contracts.requests import Usage

Deltas = AsyncGenerator[tuple[int, Delta], None]
Json = list[bytes]  # JSON text in pieces, never joined: an answer may be large

SENT_AT_ONCE_BYTES = 1 << 18
TEXT_OVERHEAD_BYTES = 64  # of a short string


class ChunkedResponse(Response):
    """Sent in pieces, each when the client has taken most of those before: what it has not yet
    taken is still the request's."""

    media_type = "application/json"

    def __init__(self, pieces: Json) -> None:
        super().__init__()
        self._pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in _regrouped(self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _regrouped(pieces: Json) -> Iterator[bytes]:
    """The same bytes, about SENT_AT_ONCE_BYTES at a time."""
    buffer = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), SENT_AT_ONCE_BYTES):
            buffer += piece[start : start + SENT_AT_ONCE_BYTES]
            if len(buffer) >= SENT_AT_ONCE_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def json_response(body: object) -> Response:
    return pieces_response([msgspec.json.encode(body)])


def pieces_response(pieces: Json) -> Response:
    if sum(map(len, pieces)) > SENT_AT_ONCE_BYTES:
        return ChunkedResponse(pieces)
    return Response(b"".join(pieces), media_type="application/json")


def json_object(fields: dict[str, Any], long: dict[str, Json]) -> Json:
    """`fields`, at least one, and behind them those that are JSON already."""
    pieces = [msgspec.json.encode(fields)[:-1]]
    for name, value in long.items():
        pieces += [b",", msgspec.json.encode(name), b":", *value]
    return [*pieces, b"}"]


def json_list(items: Iterable[Json]) -> Json:
    pieces = [b"["]
    for item in items:
        if len(pieces) > 1:
            pieces.append(b",")
        pieces += item
    return [*pieces, b"]"]


def response_fields(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every chunk of an answer repeats."""
    return {
        "id": f"{prefix}-{fresh_id()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


class UsageTally:
    """The request's usage: each prompt counts once, however many choices it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._completion_tokens = 0

    def add(self, prompt: int, usage: Usage) -> None:
        self._prompts.setdefault(prompt, usage)
        self._completion_tokens += usage.completion_tokens

    def result(self) -> TokenUsage:
        return token_usage(self._prompts.values(), self._completion_tokens)


def token_usage(usages: Iterable[Usage], completion_tokens: int = 0) -> TokenUsage:
    """The `usage` object of an OpenAI answer. usages: of its prompts."""
    total = add_usage(list(usages))
    return TokenUsage(
        prompt_tokens=total.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=total.prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=total.cached_tokens),
    )


class LogprobsJson(Protocol):
    """Log-probabilities as they will stand in the answer: as JSON, at once, for as objects they
    take ten times as much."""

    def add(self, tokens: Sequence[ShownToken]) -> int:
        """Returns how many bytes it has grown by."""

    def pieces(self) -> Json: ...


class ChoiceBuilder:
    """One choice, put together from its deltas. account: charged for what it holds."""

    def __init__(self, logprobs: LogprobsJson | None, account: MemoryAccount) -> None:
        self._texts: list[str] = []
        self._logprobs = logprobs
        self._account = account
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> Json:
        return [b"null"] if self._logprobs is None else self._logprobs.pieces()

    def add(self, delta: Delta) -> None:
        """Raises what charging the account does."""
        self._texts.append(delta.text)
        grown = TEXT_OVERHEAD_BYTES + len(delta.text)
        if self._logprobs is not None:
            grown += self._logprobs.add(delta.tokens)
        self._account.grow(grown)
        self.finish_reason = delta.finish_reason or self.finish_reason


async def collect(deltas: Deltas, choices: Sequence[ChoiceBuilder]) -> None:
    async with aclosing(deltas):
        async for index, delta in deltas:
            choices[index].add(delta)
