"""`tandem bench`: open-loop load for a server with OpenAI's API: tables, JSON and a picture."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.observe.server_client import Server, send_request
from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.bench.datasets import Lengths, Turn, read_conversations, read_trace
from cluster.tools.bench.load_generator import BenchSettings, HttpLoadGenerator
from cluster.tools.bench.workload import (
    LatencyStats,
    LoadSummary,
    RequestArrival,
    RequestResult,
    always,
    chat_lengths,
    from_trace,
    poisson,
    summarize,
)
from cluster.tools.plots import saved_figure
from contracts.errors import ConfigError, writing
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


_ROWS = (
    ("time to first token", "ttft"),
    ("time between tokens", "itl"),
    ("time per output token", "tpot"),
    ("turnaround", "e2el"),
)


def result_json(found: Bench, *, detailed: bool) -> dict[str, Any]:
    """Return the result under the names of `vllm bench serve`.

    detailed: with lists of each request's figures, as by its `--save-detailed`.
    """
    settings = found.settings
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if "chat" in settings.path else "openai",
        "model_id": found.model,
        "url": settings.url,
        "seed": settings.seed,
        "request_rate": settings.rate,
        "goodput_objectives_ms": settings.goodput,
        **_flat(found.all),
        "by_class": {label: _flat(summary) for label, summary in found.by_class.items()},
        "retries": None if found.retries is None else _flat(found.retries),
        **(_details(found.outcomes) if detailed else {}),
    }


def _flat(summary: LoadSummary) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(summary)
    for _, metric in _ROWS:
        figures = tree.pop(metric)
        tree |= {f"{name}_{metric}_ms": value for name, value in figures.items()}
        tree[f"median_{metric}_ms"] = figures["p50"]
    return tree


def _details(outcomes: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """Return vLLM's lists of figures in seconds; null where a request has none."""
    done = [(each, not each.error) for each in outcomes]
    return {
        "start_times": [each.sent_s for each in outcomes],
        "arrival_times": [each.arrival.at_s for each in outcomes],
        "classes": [each.arrival.priority.label for each in outcomes],
        "input_lens": [each.prompt_tokens or each.arrival.lengths.prompt for each in outcomes],
        "cached_lens": [each.cached_tokens for each in outcomes],
        "output_lens": [each.tokens for each in outcomes],
        "ttfts": [each.ttft_s if is_done else None for each, is_done in done],
        "itls": [each.gaps_s for each in outcomes],
        "latencies": [each.turnaround_s if is_done else None for each, is_done in done],
        "errors": [each.error for each in outcomes],
    }


def print_bench(found: Bench) -> None:
    terminal = Terminal(highlight=False)
    groups = {"all": found.all, **found.by_class}
    if found.retries is not None and found.retries.num_prompts:
        groups["retries"] = found.retries
    if len(found.by_class) == 1:
        del groups["all"]
    for name, figures in groups.items():
        _print_figures(
            terminal, f"{found.model}, {name}" if len(groups) > 1 else found.model, figures
        )
    if found.settings.goodput:
        terms = ", ".join(f"{name} {most:g} ms" for name, most in found.settings.goodput.items())
        terminal.print(f"good: answered within {terms}")
    if found.left_out:
        terminal.print(f"rows without a user: {len(found.left_out)}, first {found.left_out[0]}")


def _print_figures(terminal: Terminal, title: str, figures: LoadSummary) -> None:
    table = plain_table(title, "mean ms", "p50", "p90", "p99", left=(title,))
    for label, field in _ROWS:
        spread: LatencyStats = getattr(figures, field)
        table.add_row(label, *map(_number, (spread.mean, spread.p50, spread.p90, spread.p99)))
    terminal.print(table)
    terminal.print(
        f"{figures.completed} of {figures.num_prompts} requests answered in "
        f"{figures.duration:.1f} s: {figures.request_throughput:.2f} requests/s, "
        f"{figures.output_throughput:.1f} tokens/s"
    )
    if figures.request_goodput is not None:
        fraction = 100 * (figures.good_request_fraction or 0.0)
        terminal.print(f"goodput: {figures.request_goodput:.2f} requests/s, {fraction:.1f} %")
    terminal.print(
        f"prompt tokens: {figures.requested_input_tokens or '-'} requested, "
        f"{figures.total_input_tokens} counted, {figures.repeated_prefix_tokens} that repeat, "
        f"{figures.total_cached_tokens} cached"
    )
    for error, count in figures.error_counts.items():
        detail = figures.error_examples.get(error)
        such = f", such as {detail}" if detail else ""
        terminal.print(f"  {count} x {error}{such}", markup=False)
    if figures.max_late_ms > 50.0:
        late_ms = figures.max_late_ms
        terminal.print(f"  sent up to {late_ms:.0f} ms late: this client is the limit")
    terminal.print()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def write_result(found: Bench, path: Path) -> None:
    """Write the result with every request. Raises ConfigError."""
    tree = result_json(found, detailed=True)
    with writing("--output", path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(tree)) + b"\n")


def draw_bench(found: Bench, path: Path) -> None:
    """Draw the distribution of latencies and their course. Raises ConfigError."""
    good = [each for each in found.outcomes if not each.error]
    with saved_figure(path, "--picture", ncols=2, figsize=(11, 3.6)) as (shares, course):
        for label, times_s in (
            ("time to first token", [each.ttft_s for each in good]),
            ("time between tokens", [gap for each in good for gap in each.gaps_s]),
            ("turnaround", [each.turnaround_s for each in good]),
        ):
            ordered = sorted(1e3 * max(time_s, 1e-4) for time_s in times_s)
            if ordered:
                parts = [(place + 1) / len(ordered) for place in range(len(ordered))]
                shares.step(ordered, parts, where="post", label=label)
        shares.set(xscale="log", xlabel="ms", ylabel="share at most so long", ylim=(0, 1.01))
        shares.legend(fontsize=8)
        at_s = [each.arrival.at_s for each in good]
        course.plot(at_s, [1e3 * each.ttft_s for each in good], ".", ms=3, label="answered")
        failed = [each.arrival.at_s for each in found.outcomes if each.error]
        if failed:
            course.plot(failed, [0.0] * len(failed), "x", ms=4, label="refused or failed")
        course.set(xlabel="arrival, s", ylabel="time to first token, ms")
        course.legend(fontsize=8)
        shares.figure.suptitle(f"{found.model}: {found.all.num_prompts} requests", fontsize=10)
