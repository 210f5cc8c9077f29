"""Arrivals and lengths of requests: drawn, or read from a trace."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from contracts.errors import ConfigError
from contracts.requests import Priority


class Lengths(NamedTuple):
    """Tokens of the prompt and of the output, 1 or more."""

    prompt: int
    output: int


class RequestArrival(NamedTuple):
    """at_s: after the start."""

    at_s: float
    priority: Priority
    lengths: Lengths


Draw = Callable[[random.Random], Lengths]


def always(prompt: int, output: int) -> Draw:
    return lambda _: Lengths(prompt, output)


def chat_lengths(most: Lengths = Lengths(512, 256)) -> Draw:  # noqa: B008
    """Return a sampler similar to ShareGPT's first turns: lognormal, medians 75 and 100."""

    def draw(rng: random.Random) -> Lengths:
        prompt, output = rng.lognormvariate(4.3, 0.8), rng.lognormvariate(4.6, 0.6)
        return Lengths(
            min(max(4, round(prompt)), most.prompt), min(max(1, round(output)), most.output)
        )

    return draw


def poisson(
    rate: float, seconds: float, draw: Draw, ls: float, rng: random.Random
) -> list[RequestArrival]:
    """Draw Poisson arrivals. rate: per second. ls: fraction of latency-sensitive requests."""
    arrivals, at_s = [], 0.0
    while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < seconds:
        priority = Priority.LS if rng.random() < ls else Priority.BE
        arrivals.append(RequestArrival(at_s, priority, draw(rng)))
    return arrivals


def from_trace(rows: Iterable[tuple[float, Lengths]], ls: float, seed: int) -> list[RequestArrival]:
    """Take arrivals from a trace. ls: fraction that is drawn to be latency-sensitive."""
    rng = random.Random(seed)
    return [
        RequestArrival(at_s, Priority.LS if rng.random() < ls else Priority.BE, lengths)
        for at_s, lengths in rows
    ]


def fit_trace(
    rows: Sequence[tuple[float, Lengths]], seconds: float, rate: float, divisor: int
) -> list[tuple[float, Lengths]]:
    """Scale a trace to a small machine.

    Arrivals keep their pattern, with `rate` per second on average over `seconds`; lengths are
    divided.
    """
    kept = rows[: round(rate * seconds)]
    stretch = seconds / kept[-1][0]
    return [
        (
            at_s * stretch,
            Lengths(max(4, lengths.prompt // divisor), max(1, lengths.output // divisor)),
        )
        for at_s, lengths in kept
    ]


Row = tuple[float, Lengths]  # seconds after the first one

MAX_ROWS: Final = 1_000_000
_MAX_LINE_CHARS: Final = 1 << 20


def read_trace(path: Path) -> list[Row]:
    """Read at most MAX_ROWS rows in order of time.

    The format follows the ending. Raises ConfigError.
    """
    readers = {".csv": _azure_rows, ".jsonl": _mooncake_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"--trace {path}: end its name in .csv or .jsonl, for what it is")
    try:
        with path.open(encoding="utf-8") as file:
            rows = list(_bounded(reader(_lines(file.readline, path)), path))
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: not UTF-8: {error.reason}") from None
    if not rows:
        raise ConfigError(f"--trace {path}: has no rows")
    rows.sort(key=lambda row: row[0])
    first_s = rows[0][0]
    return [(at_s - first_s, lengths) for at_s, lengths in rows]


def _lines(readline: Callable[[int], str], path: Path) -> Iterator[str]:
    while line := readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise ConfigError(f"--trace {path}: a line of over {_MAX_LINE_CHARS} characters")
        yield line


def _bounded(rows: Iterator[tuple[object, object, object]], path: Path) -> Iterator[Row]:
    for number, (at, prompt, output) in enumerate(rows, 1):
        if number > MAX_ROWS:
            return
        try:
            at_s, lengths = float(str(at)), Lengths(int(str(prompt)), int(str(output)))
        except ValueError as error:
            raise ConfigError(f"--trace {path}: row {number}: {error}") from None
        if not math.isfinite(at_s) or min(lengths) < 0:
            raise ConfigError(f"--trace {path}: row {number}: times and lengths are from 0 on")
        yield at_s, Lengths(max(1, lengths.prompt), max(1, lengths.output))


def _azure_rows(lines: Iterator[str]) -> Iterator[tuple[object, object, object]]:
    for row in csv.DictReader(lines):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at_s, row["ContextTokens"], row["GeneratedTokens"]
        except KeyError as error:
            raise ConfigError(f"--trace: no column {error}: it is no Azure trace") from None
        except (TypeError, ValueError):
            yield row.get("TIMESTAMP"), 0, 0  # the row's number is reported


def _mooncake_rows(lines: Iterator[str]) -> Iterator[tuple[object, object, object]]:
    for line in lines:
        try:
            row: Any = msgspec.json.decode(line)
            yield row["timestamp"] / 1e3, row["input_length"], row["output_length"]
        except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
            yield line[:80].strip(), 0, 0  # the row's number is reported
