"""`tandem bench`: open-loop load for a server with OpenAI's API, and what its clients measure."""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from cluster.observe.server_client import bearer, unreachable_error, uses_proxies
from cluster.tools.bench.workload import (
    LoadSummary,
    RequestArrival,
    RequestResult,
    always,
    chat_lengths,
    fit_trace,
    from_trace,
    poisson,
    read_trace,
    summarize,
)
from contracts.clock import monotonic_s
from contracts.errors import ConfigError
from contracts.requests import Priority

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


MAX_REQUESTS: Final = 1_000_000
_REQUEST_TIMEOUT_S: Final = 10.0  # for the list of models
_OTHER_DESCRIPTORS: Final = 64


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run.

    rate: requests per second; None: the trace's. ls: fraction of latency-sensitive requests; None:
    requests name no class. prompt_tokens, output_tokens: of each request; None: from the trace or
    as in chats. divisor: of a trace's lengths.
    """

    url: str
    model: str | None = None
    key: str | None = None
    chat: bool = False
    rate: float | None = 1.0
    seconds: float = 30.0
    trace: Path | None = None
    divisor: int = 1
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ls: float | None = None
    timeout_s: float = 600.0
    retries_refused: bool = False
    fields: dict[str, Any] = {}
    seed: int = 0


class Bench(msgspec.Struct, frozen=True):
    """retries: of refused clients. by_class: empty if requests name no class."""

    url: str
    model: str
    seed: int
    all: LoadSummary
    by_class: dict[str, LoadSummary]
    retries: LoadSummary | None
    outcomes: list[RequestResult]


def bench(settings: BenchSettings, progress: Callable[[int, int], None]) -> Bench:
    """Send the load.

    progress: called with the numbers of ended and of all requests. Raises ConfigError before the
    first request.
    """
    arrivals = _arrivals(settings)
    model = asyncio.run(_model(settings))
    target = LoadTarget(
        url=settings.url,
        model=model,
        key=settings.key,
        path="/v1/chat/completions" if settings.chat else "/v1/completions",
        classes=settings.ls is not None,
        fields=settings.fields,
    )
    outcomes = [RequestResult(arrival) for arrival in arrivals]
    generator = HttpLoadGenerator(
        target,
        settings.seed,
        retries_refused=settings.retries_refused,
        max_open=_max_open(),
        progress=lambda ended: progress(ended, len(outcomes)),
    )
    asyncio.run(generator.run(outcomes, settings.timeout_s))
    return Bench(
        settings.url,
        model,
        settings.seed,
        summarize(outcomes),
        _by_class(outcomes) if settings.ls is not None else {},
        summarize(generator.retries) if settings.retries_refused else None,
        outcomes,
    )


def _arrivals(settings: BenchSettings) -> list[RequestArrival]:
    rng, ls = random.Random(settings.seed), 1.0 if settings.ls is None else settings.ls
    if settings.trace is not None:
        rows = read_trace(settings.trace)
        rate = settings.rate or len(rows) / max(rows[-1][0], 1e-9)
        _check_number(rate * settings.seconds)
        kept = rows[: max(2, round(rate * settings.seconds))]
        if kept[-1][0] <= 0:
            raise ConfigError(f"--trace {settings.trace}: all of its requests arrive at once")
        picked = fit_trace(kept, settings.seconds, len(kept) / settings.seconds, settings.divisor)
        return from_trace(picked, ls, settings.seed)
    rate = 1.0 if settings.rate is None else settings.rate
    _check_number(rate * settings.seconds)
    draw = chat_lengths()
    if settings.prompt_tokens is not None or settings.output_tokens is not None:
        draw = always(settings.prompt_tokens or 64, settings.output_tokens or 64)
    arrivals = poisson(rate, settings.seconds, draw, ls, rng)
    if not arrivals:
        raise ConfigError(
            f"--rate {rate:g} for --seconds {settings.seconds:g}: no request arrives; increase one"
        )
    return arrivals


def _check_number(requests: float) -> None:
    if requests > MAX_REQUESTS:
        raise ConfigError(
            f"--rate x --seconds: {requests:.0f} requests, at most {MAX_REQUESTS}; give less"
        )


async def _model(settings: BenchSettings) -> str:
    """Return the given model, or the first that the server lists.

    Raises ConfigError if the server does not answer.
    """
    headers = bearer(settings.key)
    try:
        async with httpx.AsyncClient(
            base_url=settings.url,
            timeout=_REQUEST_TIMEOUT_S,
            headers=headers,
            trust_env=uses_proxies(settings.url),
        ) as client:
            answer = await asyncio.wait_for(client.get("/v1/models"), _REQUEST_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError, TimeoutError) as error:
        raise unreachable_error(settings.url, error) from None
    if settings.model is not None:
        return settings.model
    if answer.status_code in (401, 403):
        raise ConfigError(
            f"--url {settings.url}: {answer.status_code}: give --api-key, or set TANDEM_API_KEY"
        )
    try:
        name = answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ConfigError(
            f"--url {settings.url}: /v1/models (status {answer.status_code}) lists no model: give "
            "--model"
        )
    return name


def _max_open() -> int:
    """Return the number of connections that this process may open."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS)


def _by_class(outcomes: Sequence[RequestResult]) -> dict[str, LoadSummary]:
    of = {
        priority.label: [each for each in outcomes if each.arrival.priority is priority]
        for priority in Priority
    }
    return {label: summarize(results) for label, results in of.items() if results}
