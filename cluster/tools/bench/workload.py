"""Requests of a load test: arrivals and lengths, drawn or from a trace, results and statistics."""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
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


class RequestResult(msgspec.Struct):
    """Result of one request.

    Times are seconds after the start; latencies count from the arrival, not from sending. tokens_s:
    arrival of each piece of the answer. usage_tokens: generated tokens as reported by the server,
    or 0. detail: the server's error message. retry_s: Retry-After of a refusal.
    """

    arrival: RequestArrival
    sent_s: float = math.nan
    tokens_s: list[float] = []
    end_s: float = math.nan
    error: str = ""
    detail: str = ""
    retry_s: float | None = None
    usage_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Return the server's count of tokens, or else the number of pieces."""
        return self.usage_tokens or len(self.tokens_s)

    @property
    def tpot_s(self) -> float:
        """Return the mean time per token after the first; NaN of one token."""
        if self.tokens < 2:
            return math.nan
        return (self.tokens_s[-1] - self.tokens_s[0]) / (self.tokens - 1)

    @property
    def turnaround_s(self) -> float:
        return self.end_s - self.arrival.at_s


def percentile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank percentile; NaN of no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class LatencyStats(msgspec.Struct, frozen=True):
    """Statistics in milliseconds; None without values."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @staticmethod
    def of(times_s: Iterable[float]) -> LatencyStats:
        found = [1e3 * each for each in times_s if not math.isnan(each)]
        if not found:
            return LatencyStats(None, None, None, None)
        return LatencyStats(mean(found), *(percentile(found, q) for q in (0.5, 0.9, 0.99)))


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of some requests.

    errors: count by status or reason. detail: one message of each. seconds: from the first arrival
    to the last end. late_ms: largest delay between arrival and sending.
    """

    requests: int
    answered: int
    errors: dict[str, int]
    detail: dict[str, str]
    seconds: float
    ttft_ms: LatencyStats
    tbt_ms: LatencyStats
    tpot_ms: LatencyStats
    turnaround_ms: LatencyStats
    requests_per_s: float
    tokens_per_s: float
    late_ms: float


def summarize(outcomes: Sequence[RequestResult]) -> LoadSummary:
    good = [each for each in outcomes if not each.error]
    ends_s = [each.end_s for each in outcomes if not math.isnan(each.end_s)]
    seconds = max(ends_s, default=0.0) - min((each.arrival.at_s for each in outcomes), default=0.0)
    late_s = [each.sent_s - each.arrival.at_s for each in outcomes if not math.isnan(each.sent_s)]
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    return LoadSummary(
        requests=len(outcomes),
        answered=len(good),
        errors=dict(Counter(each.error for each in outcomes if each.error).most_common()),
        detail={each.error: each.detail for each in outcomes if each.detail},
        seconds=seconds,
        ttft_ms=LatencyStats.of(each.ttft_s for each in good),
        tbt_ms=LatencyStats.of(gap for each in good for gap in each.gaps_s),
        tpot_ms=LatencyStats.of(each.tpot_s for each in good),
        turnaround_ms=LatencyStats.of(each.turnaround_s for each in good),
        requests_per_s=len(good) * per_s,
        tokens_per_s=sum(each.tokens for each in good) * per_s,
        late_ms=1e3 * max(late_s, default=0.0),
    )
