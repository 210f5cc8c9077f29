"""Building of answers: JSON in pieces, usage, choices, log-probabilities, event streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.http import response_types
from cluster.http.cost import MemoryAccount
from cluster.http.errors import error_body, outcome_of
from cluster.http.request_context import RequestContext, fresh_id
from cluster.http.response_types import PromptTokensDetails, TokenUsage
from cluster.http.text import Delta, ShownToken
from contracts.errors import ClientGoneError, TandemError
from contracts.metrics import RequestOutcome
from contracts.requests import Usage, add_usage
from models.text.tokenizer import Tokenizer

Deltas = AsyncGenerator[tuple[int, Delta], None]
Json = list[bytes]  # pieces of JSON text, never joined: an answer may be large
# The log-probabilities of tokens, as a struct of lists and of fields that are always null.
LogprobsOf = Callable[
    [Sequence[ShownToken]], response_types.CompletionLogprobs | response_types.ChatLogprobs
]

SENT_AT_ONCE_BYTES = 1 << 18
TEXT_OVERHEAD_BYTES = 64
DONE = b"data: [DONE]\n\n"


def json_response(body: object) -> Response:
    return pieces_response([msgspec.json.encode(body)])


def pieces_response(pieces: Json) -> Response:
    """Return the response, in pieces if it is long: each when those before have been read."""
    size = sum(map(len, pieces))
    if size <= SENT_AT_ONCE_BYTES:
        return Response(b"".join(pieces), media_type="application/json")
    length = {"content-length": str(size)}
    return StreamingResponse(_regrouped(pieces), headers=length, media_type="application/json")


async def _regrouped(pieces: Json) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of about SENT_AT_ONCE_BYTES."""
    buffer = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), SENT_AT_ONCE_BYTES):
            buffer += piece[start : start + SENT_AT_ONCE_BYTES]
            if len(buffer) >= SENT_AT_ONCE_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def json_object(fields: dict[str, Any], long: dict[str, Json]) -> Json:
    """Return an object of `fields`, at least one, followed by fields that are JSON already."""
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
    """Return the fields that every chunk of an answer repeats."""
    return {
        "id": f"{prefix}-{fresh_id()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def token_usage(usages: Iterable[Usage], completion_tokens: int = 0) -> TokenUsage:
    """Return OpenAI's `usage` object. usages: of the prompts."""
    total = add_usage(list(usages))
    return TokenUsage(
        prompt_tokens=total.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=total.prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=total.cached_tokens),
    )


class ChoiceBuilder:
    """One choice of an answer, built from its deltas and charged to `account`.

    logprobs_of: None: without log-probabilities. They are kept as JSON: objects would take ten
    times the memory.
    """

    def __init__(self, logprobs_of: LogprobsOf | None, account: MemoryAccount) -> None:
        self._texts: list[str] = []
        self._logprobs_of = logprobs_of
        self._slices: dict[str, Json] = {}  # of the lists, without their brackets
        self._account = account
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> Json:
        if self._logprobs_of is None:
            return [b"null"]
        pieces: Json = []
        for name, empty in msgspec.structs.asdict(self._logprobs_of([])).items():
            slices = json_list([each] for each in self._slices.get(name, ()))
            pieces += [b"," if pieces else b"{", msgspec.json.encode(name), b":"]
            pieces += [b"null"] if empty is None else slices
        return [*pieces, b"}"]

    def add(self, delta: Delta) -> None:
        """Add a delta. Raises what charging the account raises."""
        self._texts.append(delta.text)
        grown = TEXT_OVERHEAD_BYTES + len(delta.text)
        if self._logprobs_of is not None and delta.tokens:
            for name, values in msgspec.structs.asdict(self._logprobs_of(delta.tokens)).items():
                if values:
                    encoded = msgspec.json.encode(values)[1:-1]
                    self._slices.setdefault(name, []).append(encoded)
                    grown += len(encoded)
        self._account.grow(grown)
        self.finish_reason = delta.finish_reason or self.finish_reason


def completion_logprobs(
    tokenizer: Tokenizer, num_top: int, tokens: Sequence[ShownToken]
) -> response_types.CompletionLogprobs:
    """Return the form of /v1/completions: four parallel lists.

    The first token of a prompt has no log-probability (null). `top_logprobs` includes the chosen
    token, so it may have num_top + 1 entries; it is null if the rank returned no alternatives.
    """
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token in tokens:
        name = token_name(tokenizer, token.token_id)
        names.append(name)
        offsets.append(token.offset)
        if token.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(token.logprob.logprob)
        alternatives = {token_name(tokenizer, other): p for other, p in token.logprob.top}
        known = alternatives or not num_top
        tops.append({**alternatives, name: token.logprob.logprob} if known else None)
    return response_types.CompletionLogprobs(
        tokens=names, token_logprobs=values, top_logprobs=tops, text_offset=offsets
    )


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ShownToken]
) -> response_types.ChatLogprobs:
    """Return the form of /v1/chat/completions: one object per token, with its bytes."""
    content = []
    for token in tokens:
        if token.logprob is None:
            continue
        top = [_alternative(tokenizer, *other) for other in token.logprob.top]
        chosen = _alternative(tokenizer, token.token_id, token.logprob.logprob)
        content.append(
            response_types.ChatTokenLogprob(
                token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
            )
        )
    return response_types.ChatLogprobs(content=content, refusal=None)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the token's text; `bytes:\\xe2\\x82` for a part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> response_types.TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return response_types.TopLogprob(
        token=data.decode(errors="replace"), logprob=logprob, bytes=list(data)
    )


def sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Response of server-sent events, each flushed as it comes.

    `open` waits for the first event, so that an earlier failure has its HTTP status; a later
    failure is sent as an error event.
    """

    def __init__(
        self, ctx: RequestContext, first: bytes, rest: AsyncGenerator[bytes, None]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._ctx = ctx
        self._first = first
        self._rest = rest

    @classmethod
    async def open(cls, ctx: RequestContext, frames: AsyncGenerator[bytes, None]) -> EventStream:
        """Return the response once the first event exists. Call it inside `ctx.run`."""
        try:
            first = await anext(frames)
        except BaseException:
            await frames.aclose()
            raise
        return cls(ctx, first, frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._rest):
                await self._ctx.run(self._pump(send))
        except TandemError as error:
            self._ctx.finish(outcome_of(error))
            if not isinstance(error, ClientGoneError):
                await self._send(send, sse(error_body(error)) + DONE, more=False)
        except asyncio.CancelledError:
            self._ctx.finish(RequestOutcome.CLIENT_GONE)
            raise
        finally:
            self._ctx.finish(RequestOutcome.ERROR)

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._send(send, self._first, more=True)
        async for frame in self._rest:
            await self._send(send, frame, more=True)
        self._ctx.finish(RequestOutcome.OK)  # before the client sees the end and requests metrics
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
