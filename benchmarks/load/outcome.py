"""What became of each request, and figures of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.load.arrivals import Arrival
from contracts.requests import Priority


class Outcome(msgspec.Struct):
    """Times are seconds after the start; they count from when the request was to come, not from
    when it was sent. tokens_s: when each token came. retry_s: a refusal's Retry-After."""

    arrival: Arrival
    sent_s: float = math.nan
    tokens_s: list[float] = []
    end_s: float = math.nan
    error: str = ""
    retry_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    @property
    def turnaround_s(self) -> float:
        return self.end_s - self.arrival.at_s


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest rank: a value that occurred. NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def figures(outcomes: Iterable[Outcome], priority: Priority, seconds: float) -> dict[str, Any]:
    """Of one class, over `seconds`: times in ms, tokens and jobs per second."""
    mine = [each for each in outcomes if each.arrival.priority is priority]
    good = [each for each in mine if not each.error]
    ttfts = [1e3 * each.ttft_s for each in good]
    gaps = [1e3 * gap for each in good for gap in each.gaps_s]
    turnarounds = [each.turnaround_s for each in good]
    return {
        "requests": len(mine),
        "failed": len(mine) - len(good),
        "ttft_ms": mean(ttfts),
        "ttft_p50_ms": percentile(ttfts, 0.5),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "tbt_ms": mean(gaps),
        "tbt_p99_ms": percentile(gaps, 0.99),
        "turnaround_s": mean(turnarounds),
        "jobs_per_s": len(good) / seconds,
        "late_sent_ms": 1e3 * max((each.sent_s - each.arrival.at_s for each in mine), default=0),
    }
