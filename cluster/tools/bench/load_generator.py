"""Load over streaming HTTP for any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx
import msgspec

from cluster.observe.server_client import bearer, uses_proxies
from cluster.tools.bench.outcome import RequestResult
from contracts.clock import monotonic_s

WORDS: Final = ["the", "of", "and", "to", "in", "that", "was", "his", "it", "with", "is", "for"]
_DONE: Final = "data: [DONE]"
_MAX_ERROR_CHARS: Final = 120


class LoadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A server. path: "/v1/completions" or "/v1/chat/completions".

    classes: whether requests name their class, which not every server accepts. fields: added to
    each body.
    """

    url: str
    model: str
    key: str | None = None
    path: str = "/v1/completions"
    classes: bool = True
    fields: dict[str, Any] = {}


class _Piece(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None

    @property
    def is_content(self) -> bool:
        """Return false for the first piece of a chat, which names the role only."""
        if self.delta is None:
            return self.text is not None
        return bool(self.delta.get("content") or self.delta.get("reasoning_content"))


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Piece] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)


class HttpLoadGenerator:
    """Sender of requests at their arrival times.

    retries_refused: a refused client waits as advised and retries once. max_open: limit of open
    requests; a request beyond it is not sent but counted as an error, since waiting would close the
    loop.
    """

    def __init__(
        self,
        target: LoadTarget,
        seed: int,
        *,
        retries_refused: bool = False,
        max_open: int = 8192,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        """progress: called with the number of ended requests."""
        self._target = target
        self._rng = random.Random(seed)
        self._retries_refused = retries_refused
        self._max_open = max_open
        self._progress = progress
        self._open = self._ended = 0
        self.retries: list[RequestResult] = []

    async def run(self, outcomes: Sequence[RequestResult], timeout_s: float) -> None:
        """Send the requests and fill in their results. timeout_s: per request, from sent to end."""
        target = self._target
        headers = bearer(target.key)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=target.url,
            timeout=timeout_s,
            limits=limits,
            headers=headers,
            trust_env=uses_proxies(target.url),
        ) as client:
            start_s, tasks = monotonic_s(), []
            for outcome in outcomes:
                delay_s = start_s + outcome.arrival.at_s - monotonic_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                if self._open >= self._max_open:
                    outcome.error = f"not sent: {self._open} requests were open"
                    continue
                self._open += 1
                tasks.append(asyncio.create_task(self._one(client, outcome, start_s, timeout_s)))
            await asyncio.gather(*tasks)

    async def _one(
        self, client: httpx.AsyncClient, outcome: RequestResult, start_s: float, timeout_s: float
    ) -> None:
        body = self._body(outcome)
        await self._send(client, body, outcome, start_s, timeout_s)
        if outcome.retry_s is not None and self._retries_refused:
            await asyncio.sleep(outcome.retry_s)
            retry = RequestResult(outcome.arrival._replace(at_s=monotonic_s() - start_s))
            self.retries.append(retry)
            await self._send(client, body, retry, start_s, timeout_s)
        self._open -= 1
        self._ended += 1
        self._progress(self._ended)

    def _body(self, outcome: RequestResult) -> dict[str, Any]:
        """Build a body; one word is about one token."""
        target, arrival = self._target, outcome.arrival
        text = " ".join(self._rng.choices(WORDS, k=arrival.lengths.prompt))
        is_chat = target.path.endswith("chat/completions")
        prompt_fields = (
            {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        )
        return {
            "model": target.model,
            **prompt_fields,
            "max_tokens": arrival.lengths.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"priority": arrival.priority.label} if target.classes else {}),
            **target.fields,
        }

    async def _send(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        outcome: RequestResult,
        start_s: float,
        timeout_s: float,
    ) -> None:
        outcome.sent_s = monotonic_s() - start_s
        try:
            async with (
                asyncio.timeout(timeout_s),
                client.stream("POST", self._target.path, json=body) as response,
            ):
                if response.status_code == 200:
                    await _read_stream(response, outcome, start_s)
                else:
                    await response.aread()
                    _refused(outcome, response)
        except TimeoutError:
            outcome.error = "ReadTimeout"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            outcome.error = type(error).__name__
        outcome.end_s = monotonic_s() - start_s


def _refused(outcome: RequestResult, response: httpx.Response) -> None:
    outcome.error = f"{response.status_code}"
    outcome.detail = " ".join(response.text[:_MAX_ERROR_CHARS].split())
    try:
        outcome.retry_s = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        outcome.retry_s = None  # absent, or a date


async def _read_stream(response: httpx.Response, outcome: RequestResult, start_s: float) -> None:
    times: list[float] = []
    outcome.tokens_s = times
    is_whole = False
    async for line in response.aiter_lines():
        is_whole = is_whole or line == _DONE
        if not line.startswith("data: {"):
            continue
        try:
            chunk = _DECODER.decode(line[6:])
        except (msgspec.DecodeError, RecursionError):
            outcome.error = f"no chunk: {line[:_MAX_ERROR_CHARS]}"
            return
        if chunk.error:
            outcome.error = f"{chunk.error}"[:_MAX_ERROR_CHARS]
        if chunk.usage is not None:
            outcome.usage_tokens = chunk.usage.completion_tokens
        if any(piece.is_content for piece in chunk.choices):
            times.append(monotonic_s() - start_s)
    if not outcome.error and (not is_whole or not times):
        outcome.error = "the answer has no end" if times else "the answer has no tokens"
