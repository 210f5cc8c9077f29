"""`tandem bench`: open-loop load for a server, and what its clients measure."""

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
from cluster.tools.bench.load_generator import HttpLoadGenerator, LoadTarget
from cluster.tools.bench.outcome import LoadSummary, RequestResult, summarize
from cluster.tools.bench.workload import (
    RequestArrival,
    always,
    chat_lengths,
    fit_trace,
    from_trace,
    poisson,
    read_trace,
)
from contracts.errors import ConfigError
from contracts.requests import Priority

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
