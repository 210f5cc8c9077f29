"""Results of requests, and their statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from cluster.tools.bench.workload import RequestArrival


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
