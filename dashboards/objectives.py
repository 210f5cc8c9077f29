"""What is promised to latency-sensitive (LS) requests, and how fast the allowance for breaking it
is used up: read by the board *Objectives* and by alerts."""

from __future__ import annotations

from typing import NamedTuple

from contracts import metrics
from contracts.metrics import Metric, RequestOutcome


class ServiceObjective(NamedTuple):
    """Of all that `total` counts, the part that is not `good` may be `allowed` of it. Both are
    series' names with their selection."""

    name: str
    promise: str
    good: str
    total: str
    allowed: float

    def burn(self, window: str, where: str = "", by: str = "") -> str:
        """PromQL: how many times as fast as allowed the promise was broken in the window; 1 uses
        the allowance up exactly. Nothing where nothing was asked for. by: labels to tell apart."""
        of = f" by ({by})" if by else ""
        good, total = (
            f"sum{of} (rate({_chosen(series, where)}[{window}]))"
            for series in (self.good, self.total)
        )
        return f"(1 - ({good} or 0 * {total}) / ({total} > 0)) / {self.allowed:g}"


def _within(metric: Metric, bound_s: float) -> tuple[str, str]:
    """bound_s: one of the metric's buckets."""
    assert bound_s in metric.buckets, f"{metric.name}: {bound_s} is no bucket"
    return (
        f'{metric.name}_bucket{{class="ls", le="{bound_s!r}"}}',
        f'{metric.name}_count{{class="ls"}}',
    )


def _chosen(series: str, where: str) -> str:
    return series.replace("}", f", {where}}}") if where else series


_ACCEPTED = "|".join(
    (RequestOutcome.OK, RequestOutcome.OVERLOAD, RequestOutcome.TIMEOUT, RequestOutcome.ERROR)
)
_LOST = "|".join((RequestOutcome.TIMEOUT, RequestOutcome.ERROR))

OBJECTIVES = (
    ServiceObjective(
        "ttft", "99 % of LS requests: first token in 1 s", *_within(metrics.TTFT, 1.0), 0.01
    ),
    ServiceObjective(
        "tbt",
        "99 % of LS sequences: a token in 0.25 s, on average",
        *_within(metrics.TPOT, 0.25),
        0.01,
    ),
    ServiceObjective(
        "answers",
        "99.9 % of requests that we let in are answered",
        f'{metrics.REQUESTS.name}{{outcome=~"{_ACCEPTED}", outcome!~"{_LOST}"}}',
        f'{metrics.REQUESTS.name}{{outcome=~"{_ACCEPTED}"}}',
        0.001,
    ),
)
