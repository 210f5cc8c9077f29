"""Service level objectives, for board *Objectives* and for alerts. LS: latency-sensitive."""

from typing import NamedTuple

from contracts import metrics
from contracts.metrics import Metric, RequestOutcome


class ServiceObjective(NamedTuple):
    """An objective: at most the fraction `allowed` of `total` may be outside of `good`.

    good, total: series with their selection. action: what to do if it is missed.
    """

    name: str
    title: str
    promise: str
    action: str
    good: str
    total: str
    allowed: float

    def burn(self, window: str, where: str = "") -> str:
        """Return PromQL for the burn rate of each cluster's error budget over `window`.

        1 uses the budget exactly up. There is no value without requests.
        """
        good, total = (
            f"sum by (cluster) (rate({_selected(series, where)}[{window}]))"
            for series in (self.good, self.total)
        )
        return f"(1 - ({good} or 0 * {total}) / ({total} > 0)) / {self.allowed:g}"

    def failures(self, window: str) -> str:
        """Return PromQL for the number outside of `good` in `window`, per cluster."""
        good, total = (
            f"sum by (cluster) (increase({series}[{window}]))" for series in (self.good, self.total)
        )
        return f"{total} - ({good} or 0 * {total})"


def _within(metric: Metric, bound_s: float) -> tuple[str, str]:
    """Return the series of observations up to `bound_s`, a bucket of the metric, and of all."""
    assert bound_s in metric.buckets, f"{metric.name}: {bound_s} is no bucket"
    return (
        f'{metric.name}_bucket{{class="ls", le="{bound_s!r}"}}',
        f'{metric.name}_count{{class="ls"}}',
    )


def _selected(series: str, where: str) -> str:
    return series.replace("}", f", {where}}}") if where else series


_LOST = (RequestOutcome.TIMEOUT, RequestOutcome.ERROR)
_ACCEPTED = "|".join((RequestOutcome.OK, RequestOutcome.OVERLOAD, *_LOST))

OBJECTIVES = (
    ServiceObjective(
        "ttft",
        "time to first token",
        "99 % of LS requests: first token in 1 s",
        "see Waiting requests; add ranks, or lower priority.ls_max_wait_s to reject earlier.",
        *_within(metrics.TTFT, 1.0),
        0.01,
    ),
    ServiceObjective(
        "tbt",
        "time per token",
        "99 % of LS sequences: a token in 0.25 s, on average",
        "lower schedule.max_batch_tokens or priority.ls_tbt_s, or add ranks.",
        *_within(metrics.TPOT, 0.25),
        0.01,
    ),
    ServiceObjective(
        "answers",
        "answered requests",
        "99.9 % of admitted requests are answered",
        "see errors and timeouts in the log, and Available ranks on board Pipeline.",
        f'{metrics.REQUESTS.name}{{outcome=~"{_ACCEPTED}", outcome!~"{"|".join(_LOST)}"}}',
        f'{metrics.REQUESTS.name}{{outcome=~"{_ACCEPTED}"}}',
        0.001,
    ),
)
