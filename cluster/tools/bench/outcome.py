"""What became of each request, and figures of many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from cluster.tools.bench.workload import RequestArrival


class RequestResult(msgspec.Struct):
    """Times are seconds after the start; they count from when the request was to come, not from
    when it was sent. tokens_s: when each piece of the answer came. usage_tokens: generated, as the
    server says (0: it does not). said: with an error, by the server. retry_s: a refusal's
    Retry-After."""

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
        """Generated: by the server's count, else a token for each piece."""
        return self.usage_tokens or len(self.tokens_s)

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN of one token."""
        if self.tokens < 2:
            return math.nan
        return (self.tokens_s[-1] - self.tokens_s[0]) / (self.tokens - 1)

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


class LatencyStats(msgspec.Struct, frozen=True):
    """Of times, in milliseconds; None where there were none."""

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
    """Of some requests. errors: how many ended with each (a status, or what went wrong). said: by
    the server with one of each. seconds: from the first arrival to the last end. late_ms: how much
    later than drawn one was sent."""

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
