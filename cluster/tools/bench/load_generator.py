"""Open-loop HTTP client: sends requests when they are due and measures their answers."""

import asyncio
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from cluster.observe.server_client import bearer, uses_proxies
from cluster.tools.bench.workload import WORDS, BlockPrompt, RequestResult, prompt_text
from contracts.clock import monotonic_s

_DONE: Final = "data: [DONE]"
_MAX_ERROR_CHARS: Final = 120
_OTHER_DESCRIPTORS: Final = 64


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run.

    rate: requests or conversations per second; None: the trace's. conversations: a file of them;
    think_time_s: from an answer to the next turn. divide_lengths: divisor of a trace's lengths;
    block_tokens: of its hash ids. prompt_tokens, output_tokens: of each request; None: from the
    file or as in chats. ls: fraction of latency-sensitive requests; None: requests name no class,
    which not every server accepts. goodput: upper bounds in ms of a good request's ttft, tpot and
    e2el. retry_refused: a refused client waits as advised and retries once. fields: of each body.
    """

    url: str
    model: str | None = None
    key: str | None = None
    chat: bool = False
    rate: float | None = 1.0
    seconds: float = 30.0
    trace: Path | None = None
    divide_lengths: int = 1
    block_tokens: int = 512
    conversations: Path | None = None
    think_time_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ls: float | None = None
    goodput: dict[str, float] = {}
    timeout_s: float = 600.0
    retry_refused: bool = False
    fields: dict[str, Any] = {}
    seed: int = 0

    @property
    def path(self) -> str:
        is_chat = self.chat or self.conversations is not None
        return "/v1/chat/completions" if is_chat else "/v1/completions"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Piece(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def content(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def is_token(self) -> bool:
        """Return false for the first piece of a chat, which names the role only."""
        if self.delta is None:
            return self.text is not None
        return any(msgspec.structs.astuple(self.delta))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Piece] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)


class HttpLoadGenerator:
    """Sender of requests at their arrival times.

    max_open: limit of open conversations; one beyond it is not sent but counted as an error, since
    waiting would close the loop.
    """

    def __init__(
        self,
        settings: BenchSettings,
        model: str,
        progress: Callable[[int], None] = lambda ended: None,
        max_open: int | None = None,
    ) -> None:
        """progress: called with the number of ended requests."""
        self._settings, self._model, self._progress = settings, model, progress
        self._rng = random.Random(settings.seed)
        self._max_open = max_open or _most_connections()
        self._open = self._ended = 0
        self.retries: list[RequestResult] = []

    async def run(self, conversations: Sequence[Sequence[RequestResult]]) -> None:
        """Send the requests and fill in their results.

        Turns of a conversation follow one another; most have one.
        """
        settings = self._settings
        async with httpx.AsyncClient(
            base_url=settings.url,
            timeout=settings.timeout_s,
            limits=httpx.Limits(max_connections=None),
            headers=bearer(settings.key),
            trust_env=uses_proxies(settings.url),
        ) as client:
            start_s, tasks = monotonic_s(), []
            for turns in conversations:
                delay_s = start_s + turns[0].arrival.at_s - monotonic_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                if self._open >= self._max_open:
                    self._abandon(turns, f"not sent: {self._open} requests were open")
                    continue
                self._open += 1
                tasks.append(asyncio.create_task(self._turns(client, turns, start_s)))
            await asyncio.gather(*tasks)

    async def _turns(
        self, client: httpx.AsyncClient, turns: Sequence[RequestResult], start_s: float
    ) -> None:
        settings = self._settings
        history: list[dict[str, Any]] = []
        for place, outcome in enumerate(turns):
            if place:
                await asyncio.sleep(settings.think_time_s)
                outcome.arrival = outcome.arrival._replace(at_s=monotonic_s() - start_s)
                outcome.repeated_tokens = turns[place - 1].prompt_tokens
            body = self._body(outcome, history)
            answer = await self._send(client, body, outcome, start_s)
            if outcome.retry_s is not None and settings.retry_refused:
                await asyncio.sleep(min(max(0.0, outcome.retry_s), settings.timeout_s))
                retry = RequestResult(outcome.arrival._replace(at_s=monotonic_s() - start_s))
                self.retries.append(retry)
                answer = await self._send(client, body, retry, start_s)
            self._ended += 1
            self._progress(self._ended)
            if answer is None:
                self._abandon(turns[place + 1 :], "not sent: an earlier turn failed")
                break
            history.append({"role": "assistant", "content": answer})
        self._open -= 1

    def _abandon(self, turns: Sequence[RequestResult], reason: str) -> None:
        for outcome in turns:
            outcome.error = reason
        self._ended += len(turns)

    def _body(self, outcome: RequestResult, history: list[dict[str, Any]]) -> dict[str, Any]:
        """Build a body; one word is about one token. history: is extended by a turn's messages."""
        settings, arrival, text = self._settings, outcome.arrival, ""
        if isinstance(arrival.prompt, BlockPrompt):
            text = prompt_text(arrival.prompt, arrival.lengths.prompt, settings.seed)
            outcome.repeated_tokens = arrival.prompt.repeated_tokens
        elif arrival.prompt is None:
            text = " ".join(self._rng.choices(WORDS, k=arrival.lengths.prompt))
        is_chat = settings.path.endswith("chat/completions")
        if is_chat:
            history += arrival.prompt if isinstance(arrival.prompt, list) else [_user(text)]
        prompt_fields = {"messages": history} if is_chat else {"prompt": text}
        return {
            "model": self._model,
            **prompt_fields,
            "max_tokens": arrival.lengths.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if settings.ls is None else {"priority": arrival.priority.label}),
            **settings.fields,
        }

    async def _send(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        outcome: RequestResult,
        start_s: float,
    ) -> str | None:
        """Return the answer's text, or None after an error."""
        outcome.sent_s = monotonic_s() - start_s
        answer = ""
        try:
            async with (
                asyncio.timeout(self._settings.timeout_s),
                client.stream("POST", self._settings.path, json=body) as response,
            ):
                if response.status_code == 200:
                    answer = await _read_stream(response, outcome, start_s)
                else:
                    await response.aread()
                    _refused(outcome, response)
        except TimeoutError:
            outcome.error = "ReadTimeout"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            outcome.error = type(error).__name__
        outcome.end_s = monotonic_s() - start_s
        return None if outcome.error else answer


def _most_connections() -> int:
    """Return the number of connections that this process may open."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _refused(outcome: RequestResult, response: httpx.Response) -> None:
    outcome.error = f"{response.status_code}"
    outcome.detail = " ".join(response.text[:_MAX_ERROR_CHARS].split())
    try:
        outcome.retry_s = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        outcome.retry_s = None  # absent, or a date


async def _read_stream(response: httpx.Response, outcome: RequestResult, start_s: float) -> str:
    """Return the answer's text."""
    times: list[float] = []
    outcome.tokens_s = times
    is_whole, text = False, ""
    async for line in response.aiter_lines():
        is_whole = is_whole or line == _DONE
        if not line.startswith("data: {"):
            continue
        try:
            chunk = _DECODER.decode(line[6:])
        except (msgspec.DecodeError, RecursionError):
            outcome.error = f"no chunk: {line[:_MAX_ERROR_CHARS]}"
            return text
        if chunk.error:
            outcome.error = f"{chunk.error}"[:_MAX_ERROR_CHARS]
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            outcome.usage_tokens = chunk.usage.completion_tokens
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.cached_tokens = (details.cached_tokens if details else None) or 0
        if any(piece.is_token for piece in chunk.choices):
            times.append(monotonic_s() - start_s)
        text += "".join(piece.content for piece in chunk.choices)
    if not outcome.error and (not is_whole or not times):
        outcome.error = "the answer has no end" if times else "the answer has no tokens"
    return text
