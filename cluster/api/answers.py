"""What the endpoints' answers share: identity, usage, choices collected from their deltas."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from cluster.classify import add_usage
from cluster.text import Delta, ShownToken
from contracts.requests import Usage

Deltas = AsyncGenerator[tuple[int, Delta], None]


def json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def header(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every chunk of an answer repeats."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def prefill_usage(usages: Iterable[Usage]) -> dict[str, Any]:
    """The `usage` object of an answer for which nothing was generated."""
    total = add_usage(list(usages))
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": total.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
    }


class Collected:
    """One choice, put together from its deltas."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.tokens: list[ShownToken] = []
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason or self.finish_reason


async def collect(deltas: Deltas, count: int) -> list[Collected]:
    choices = [Collected() for _ in range(count)]
    async with aclosing(deltas):
        async for index, delta in deltas:
            choices[index].add(delta)
    return choices
