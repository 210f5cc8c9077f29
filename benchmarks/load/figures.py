"""What the benchmarks tell of one class of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.tools.bench.outcome import RequestResult, mean, percentile
from contracts.requests import Priority


def figures(
    outcomes: Iterable[RequestResult], priority: Priority, seconds: float
) -> dict[str, Any]:
    """Of one class, over `seconds`: times in ms, tokens and jobs per second."""
    of_class = [each for each in outcomes if each.arrival.priority is priority]
    good = [each for each in of_class if not each.error]
    ttfts = [1e3 * each.ttft_s for each in good]
    gaps = [1e3 * gap for each in good for gap in each.gaps_s]
    turnarounds = [each.turnaround_s for each in good]
    return {
        "requests": len(of_class),
        "failed": len(of_class) - len(good),
        "ttft_ms": mean(ttfts),
        "ttft_p50_ms": percentile(ttfts, 0.5),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "tbt_ms": mean(gaps),
        "tbt_p99_ms": percentile(gaps, 0.99),
        "turnaround_s": mean(turnarounds),
        "jobs_per_s": len(good) / seconds,
        "late_sent_ms": 1e3
        * max((each.sent_s - each.arrival.at_s for each in of_class), default=0),
    }
