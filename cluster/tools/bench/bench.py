"""`tandem bench`: open-loop load for a server with OpenAI's API, and what its clients measure."""

import asyncio
import itertools
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from cluster.observe.server_client import bearer, unreachable_error, uses_proxies
from cluster.tools.bench.datasets import Lengths, Turn, read_conversations, read_trace
from cluster.tools.bench.load_generator import HttpLoadGenerator, LoadTarget
from cluster.tools.bench.workload import (
    LoadSummary,
    RequestArrival,
    RequestResult,
    always,
    chat_lengths,
    from_trace,
    poisson,
    summarize,
)
from contracts.errors import ConfigError
from contracts.requests import Priority

MAX_REQUESTS: Final = 1_000_000
_REQUEST_TIMEOUT_S: Final = 10.0  # for the list of models
_OTHER_DESCRIPTORS: Final = 64


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run.

    rate: requests or conversations per second; None: the trace's. conversations: a file of them;
    think_time_s: from an answer to the next turn. divide_lengths: divisor of a trace's lengths;
    block_tokens: of its hash ids. prompt_tokens, output_tokens: of each request; None: from the
    file or as in chats. ls: fraction of latency-sensitive requests; None: requests name no class.
    goodput: upper bounds in ms of a good request's ttft, tpot and e2el. fields: of each body.
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


class Bench(msgspec.Struct, frozen=True):
    """Result of a run.

    retries: of refused clients. by_class: empty if requests name no class. left_out: rows of the
    file without a turn of a user.
    """

    settings: BenchSettings
    model: str
    all: LoadSummary
    by_class: dict[str, LoadSummary]
    retries: LoadSummary | None
    outcomes: list[RequestResult]
    left_out: list[int]


def bench(settings: BenchSettings, progress: Callable[[int, int], None]) -> Bench:
    """Send the load.

    progress: called with the numbers of ended and of all requests. Raises ConfigError before the
    first request.
    """
    arrivals, left_out = _arrivals(settings)
    model = asyncio.run(_model(settings))
    target = LoadTarget(
        url=settings.url,
        model=model,
        key=settings.key,
        path=settings.path,
        classes=settings.ls is not None,
        fields=settings.fields,
    )
    conversations = [[RequestResult(turn) for turn in turns] for turns in arrivals]
    outcomes = list(itertools.chain(*conversations))
    generator = HttpLoadGenerator(
        target,
        settings.seed,
        retries_refused=settings.retry_refused,
        think_s=settings.think_time_s,
        max_open=_max_open(),
        progress=lambda ended: progress(ended, len(outcomes)),
    )
    asyncio.run(generator.run(conversations, settings.timeout_s))
    objectives = settings.goodput
    return Bench(
        settings,
        model,
        summarize(outcomes, objectives),
        _by_class(outcomes, objectives) if settings.ls is not None else {},
        summarize(generator.retries, objectives) if settings.retry_refused else None,
        outcomes,
        left_out,
    )


def _arrivals(settings: BenchSettings) -> tuple[list[list[RequestArrival]], list[int]]:
    """Return conversations of one or more turns, and the rows that were left out."""
    rng, ls = random.Random(settings.seed), 1.0 if settings.ls is None else settings.ls
    if settings.trace is not None:
        return [[arrival] for arrival in _trace_arrivals(settings, settings.trace, ls, rng)], []
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
    if settings.conversations is None:
        return [[arrival] for arrival in arrivals], []
    found, left_out = read_conversations(settings.conversations, len(arrivals))

    def turn_arrival(arrival: RequestArrival, turn: Turn) -> RequestArrival:
        output = settings.output_tokens or len(turn.answer.split()) or arrival.lengths.output
        return arrival._replace(lengths=Lengths(0, output), prompt=turn.messages)

    conversations = [
        [turn_arrival(arrival, turn) for turn in turns]
        for arrival, turns in zip(arrivals, itertools.cycle(found), strict=False)
    ]
    _check_number(sum(map(len, conversations)))
    return conversations, left_out


def _trace_arrivals(
    settings: BenchSettings, path: Path, ls: float, rng: random.Random
) -> list[RequestArrival]:
    rows, output = read_trace(path, settings.block_tokens), settings.output_tokens
    rate = settings.rate or (len(rows) / rows[-1].at_s if rows[-1].at_s else 0.0)
    _check_number(rate * settings.seconds)
    kept = rows[: max(2, round(rate * settings.seconds))]
    if kept[-1].at_s <= 0:
        raise ConfigError(f"--trace {path}: all {len(kept)} arrive at once; give more --seconds")
    if settings.divide_lengths > settings.block_tokens and any(row.hash_ids for row in kept):
        raise ConfigError(
            f"--divide-lengths {settings.divide_lengths}: give at most {settings.block_tokens}, of "
            "--block-tokens"
        )
    arrivals = from_trace(
        kept,
        seconds=settings.seconds,
        divisor=settings.divide_lengths,
        block_tokens=settings.block_tokens,
        ls=ls,
        rng=rng,
    )
    if output is None:
        return arrivals
    return [each._replace(lengths=each.lengths._replace(output=output)) for each in arrivals]


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


def _by_class(
    outcomes: Sequence[RequestResult], objectives: Mapping[str, float]
) -> dict[str, LoadSummary]:
    of = {
        priority.label: [each for each in outcomes if each.arrival.priority is priority]
        for priority in Priority
    }
    return {label: summarize(results, objectives) for label, results in of.items() if results}
