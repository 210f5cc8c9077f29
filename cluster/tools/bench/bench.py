"""`tandem bench`: open-loop load for a server with OpenAI's API, and what its clients measure."""

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cluster.observe.server_client import Server, send_request
from cluster.tools.bench.datasets import Lengths, Turn, read_conversations, read_trace
from cluster.tools.bench.load_generator import BenchSettings, HttpLoadGenerator
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
_MAX_BYTES: Final = 16 << 20


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
    model = _model(settings)
    conversations = [[RequestResult(turn) for turn in turns] for turns in arrivals]
    outcomes = list(itertools.chain(*conversations))
    generator = HttpLoadGenerator(settings, model, lambda ended: progress(ended, len(outcomes)))
    asyncio.run(generator.run(conversations))
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


def _model(settings: BenchSettings) -> str:
    """Return the given model, or the first that the server lists.

    Raises ConfigError if the server does not answer.
    """
    server = Server(settings.url, settings.key)
    answer = send_request(
        server, "GET", "/v1/models", most_bytes=_MAX_BYTES, timeout_s=_REQUEST_TIMEOUT_S
    )
    if settings.model is not None:
        return settings.model
    if answer.status in (401, 403):
        raise ConfigError(
            f"--url {settings.url}: {answer.status}: give --api-key, or set TANDEM_API_KEY"
        )
    try:
        name = msgspec.json.decode(answer.body)["data"][0]["id"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ConfigError(
            f"--url {settings.url}: /v1/models (status {answer.status}) lists no model: give "
            "--model"
        )
    return name


def _by_class(
    outcomes: Sequence[RequestResult], objectives: Mapping[str, float]
) -> dict[str, LoadSummary]:
    of = {
        priority.label: [each for each in outcomes if each.arrival.priority is priority]
        for priority in Priority
    }
    return {label: summarize(results, objectives) for label, results in of.items() if results}
