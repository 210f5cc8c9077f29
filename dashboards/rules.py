"""Prometheus recording rules and alerts, generated into `dashboards/rules/`.

docs/runbooks.md has a section for each alert, whose instructions are the alert's description.
Tests generate the rules at a faster pace.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from contracts import metrics
from dashboards.objectives import OBJECTIVES

RUNBOOKS = Path(__file__).parents[1] / "docs/runbooks.md"  # of a clone: packages have the results
MIN_FAILURES = 5  # a single failure of a quiet server alerts no one
MIN_BATCHES = 64  # after which the models have adapted
_MINUTE, _HOUR = 60.0, 3600.0
_UP = 'up{job="tandem"}'


class TimeScale(NamedTuple):
    """Speed-up of all durations. interval_s: time between evaluations at that pace."""

    faster: float = 1.0
    interval_s: float = 15.0

    def of(self, seconds: float) -> str:
        """Return a Prometheus duration of at least two evaluations, or 0."""
        ms = round(max(1e3 * seconds / self.faster, 2e3 * self.interval_s)) if seconds else 0
        for unit_ms, unit in ((3_600_000, "h"), (60_000, "m"), (1000, "s")):
            if ms % unit_ms == 0 and ms >= unit_ms:
                return f"{ms // unit_ms}{unit}"
        return f"{ms}ms"


NORMAL = TimeScale()


class Alert(NamedTuple):
    """An alert. section: heading in docs/runbooks.md. for_s: minimum duration of the condition."""

    name: str
    expression: str
    for_s: float
    severity: str
    section: str
    summary: str


def recording_rules(pace: TimeScale = NORMAL) -> dict[str, str]:
    """Return recorded series → PromQL."""
    minute = pace.of(_MINUTE)
    windows = (5 * _MINUTE, 30 * _MINUTE, _HOUR, 6 * _HOUR)
    found = {
        burn_series(objective.name, window_s): objective.burn(pace.of(window_s))
        for objective in OBJECTIVES
        for window_s in windows
    }
    requests, stage = metrics.REQUESTS.name, metrics.STAGE.name
    predicted, measured = metrics.PLAN_PREDICTED.name, metrics.PLAN_MEASURED.name
    return found | {
        "cluster:tandem_requests:rate1m": (
            f'sum by (cluster, pipeline, class) (rate({requests}{{outcome="ok"}}[{minute}]))'
        ),
        "cluster:tandem_prediction_error:ratio": (
            f"abs(max by (cluster) ({predicted}) / max by (cluster) ({measured}) - 1) "
            f"and on (cluster) {_batches(pace.of(5 * _MINUTE))} > 0"
        ),
        "rank:tandem_saturation_fill:ratio": (
            f"max by (cluster, rank) ({metrics.LOAD.name}) / "
            f"max by (cluster, rank) ({metrics.SATURATION.name})"
        ),
        "rank:tandem_stage_seconds:rate1m": (
            f"sum by (cluster, rank, stage) (rate({stage}_sum[{minute}]))"
        ),
        "cluster:tandem_be_time_to_first_token_seconds:p95": (
            "histogram_quantile(0.95, sum by (cluster, le) "
            f'(rate({metrics.TTFT.name}_bucket{{class="be"}}[{pace.of(5 * _MINUTE)}])))'
        ),
    }


def _batches(window: str) -> str:
    """Return PromQL for the batches of a cluster in `window`; gauges keep the latest batch."""
    return f"sum by (cluster) (increase({metrics.PLAN_BATCHES.name}[{window}]))"


def burn_series(objective: str, window_s: float) -> str:
    """Return the series of a recorded burn rate, named for the window at normal pace."""
    return f"cluster:tandem_{objective}_burn:ratio_{NORMAL.of(window_s)}"


def alerts(pace: TimeScale = NORMAL) -> list[Alert]:
    """Return all alerts, of severity page or ticket."""
    return [*_burn_rates(pace), *_rank_alerts(pace), *_work_alerts(pace)]


def _burn_rates(pace: TimeScale) -> list[Alert]:
    """Return alerts that require both windows: no firing on a short peak, or after its end.

    They also require MIN_FAILURES in the long window, and a server that still runs.
    """
    found = []
    for objective in OBJECTIVES:
        for speed, short_s, long_s, burn, for_s, severity in (
            ("Fast", 5 * _MINUTE, _HOUR, 14.4, 2 * _MINUTE, "page"),
            ("Slow", 30 * _MINUTE, 6 * _HOUR, 6.0, 15 * _MINUTE, "ticket"),
        ):
            short, long = (burn_series(objective.name, one) for one in (short_s, long_s))
            found.append(
                Alert(
                    f"Tandem{objective.name.capitalize()}Burns{speed}",
                    f"{short} > {burn:g} and {long} > {burn:g} "
                    f"and on (cluster) {objective.failures(pace.of(long_s))} > {MIN_FAILURES} "
                    f"and on (cluster) count by (cluster) ({objective.total})",
                    for_s,
                    severity,
                    "Error budget burns",
                    f"{objective.promise}: error budget burns at least {burn:g} times too fast",
                )
            )
    return found


def _rank_alerts(pace: TimeScale) -> list[Alert]:
    """Return alerts on processes. An orderly stop removes its targets, and so its series."""
    ten, day = pace.of(10 * _MINUTE), pace.of(24 * _HOUR)
    restarts = f"{metrics.RANK_RESTARTS.name}[{pace.of(15 * _MINUTE)}]"
    used = f'{metrics.KV_BLOCKS.name}{{state="used"}}'
    return [
        Alert(
            "TandemServerDown",
            f"max by (cluster) ({_UP}) == 0 "
            f"and on (cluster) max by (cluster) (max_over_time({_UP}[{day}])) == 1",
            5 * _MINUTE,
            "page",
            "Server down",
            "No process of {{ $labels.cluster }} can be scraped",
        ),
        Alert(
            "TandemRankDown",
            f"max by (cluster, group, rank) ({metrics.RANK_UP.name}) == 0",
            30.0,
            "page",
            "Rank down",
            "{{ $labels.rank }} is not available",
        ),
        Alert(
            "TandemEpochFlaps",
            f"max by (cluster, group) (changes({restarts})) > 2",
            0.0,
            "page",
            "Group epoch flaps",
            "Group {{ $labels.group }} was reformed {{ $value }} times in 15 minutes",
        ),
        Alert(
            "TandemScrapeMissing",
            f"{_UP} == 0",
            15 * _MINUTE,  # behind a proxy a server that loads does not answer
            "ticket",
            "Scrape missing",
            "Prometheus cannot scrape {{ $labels.instance }}",
        ),
        Alert(
            "TandemBlocksLeak",
            f"max by (cluster, rank) (min_over_time({used}[{ten}])) > 0 and on (cluster, rank) "
            f"max by (cluster, rank) (max_over_time({metrics.RANK_BUSY.name}[{ten}])) < 0.01",
            5 * _MINUTE,
            "ticket",
            "KV block leak",
            "KV blocks of {{ $labels.rank }} are in use although it is idle",
        ),
    ]


def _work_alerts(pace: TimeScale) -> list[Alert]:
    fill, error = "rank:tandem_saturation_fill:ratio", "cluster:tandem_prediction_error:ratio"
    first, bound = "cluster:tandem_be_time_to_first_token_seconds:p95", metrics.OBJECTIVE.name
    queue, five = metrics.REQUESTS_WAITING.name, pace.of(5 * _MINUTE)
    rejected = f'{metrics.REQUESTS.name}{{pipeline="prefill", outcome="overload"}}'
    spent_s, ended = (
        f'sum by (cluster) (rate({metrics.E2E_LATENCY.name}_{of}{{pipeline="prefill"}}[{five}]))'
        for of in ("sum", "count")
    )
    return [
        Alert(
            "TandemSaturationLost",
            f"max_over_time({fill}[{five}]) < 0.5 and on (cluster) "
            f'sum by (cluster) (min_over_time({queue}{{pipeline="prefill"}}[{five}])) > 16 '
            # otherwise they are short prompts, which are answered at once
            f"and on (cluster) (max by (cluster) (min_over_time({fill}[{five}])) > 1 "
            f"or sum by (cluster) (increase({rejected}[{five}])) > {MIN_FAILURES} "
            f"or {spent_s} / {ended} > 1)",
            2 * _MINUTE,
            "ticket",
            "Saturation lost",
            "{{ $labels.rank }} has less than half of its saturating work while prompts wait "
            "elsewhere, for over a second, or are rejected",
        ),
        Alert(
            "TandemPredictionsOff",
            f"avg_over_time({error}[{five}]) > 0.5 and on (cluster) "
            f"{_batches(pace.of(10 * _MINUTE))} > {MIN_BATCHES / pace.faster:g}",
            10 * _MINUTE,
            "ticket",
            "Inaccurate predictions",
            "Predicted batch times differ by {{ $value | humanizePercentage }} on average",
        ),
        Alert(
            "TandemBestEffortNearBound",
            f'{first} > on (cluster) 0.8 * max by (cluster) ({bound}{{objective="be_wait"}})',
            10 * _MINUTE,  # longer than the window, in which one request would do
            "ticket",
            "Best effort near its limit",
            "Best-effort requests wait {{ $value | humanizeDuration }} for a first token (p95)",
        ),
    ]


def recording_file(pace: TimeScale = NORMAL) -> dict[str, Any]:
    """Return the contents of the file of recording rules."""
    rules = [{"record": series, "expr": promql} for series, promql in recording_rules(pace).items()]
    return _file("tandem-recorded", rules, pace)


def alerts_file(pace: TimeScale = NORMAL, docs_url: str | None = None) -> dict[str, Any]:
    """Return the contents of the file of alerts. docs_url: where docs/ is published by mkdocs."""
    found = _runbooks()
    rules = [_rule(alert, pace, found[alert.section], docs_url) for alert in alerts(pace)]
    return _file("tandem-alerts", rules, pace)


def _runbooks() -> dict[str, str]:
    """Return the instructions of each section of docs/runbooks.md, as plain text."""
    text = RUNBOOKS.read_text(encoding="utf-8")
    steps = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)  # links, to pages beside this one
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", steps, re.MULTILINE)
    return {name: body[body.index("1. ") :].strip() for name, body in sections}


def prometheus_rule(*files: dict[str, Any]) -> dict[str, Any]:
    """Return the groups of `files` as an object of Prometheus' operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem", "labels": {"release": "kube-prometheus-stack"}},
        "spec": {"groups": [group for file in files for group in file["groups"]]},
    }


def anchor(section: str) -> str:
    """Return the anchor for a heading."""
    return section.lower().replace(" ", "-")


def _rule(alert: Alert, pace: TimeScale, runbook: str, docs_url: str | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.for_s:
        rule["for"] = pace.of(alert.for_s)
    annotations = {"summary": alert.summary, "description": runbook}
    if docs_url is not None:
        page = f"{docs_url.rstrip('/')}/runbooks/#{anchor(alert.section)}"
        annotations["runbook_url"] = page
    return rule | {"labels": {"severity": alert.severity}, "annotations": annotations}


def _file(name: str, rules: list[dict[str, Any]], pace: TimeScale) -> dict[str, Any]:
    group = {"name": name, "interval": _exact(pace.interval_s), "rules": rules}
    return {"groups": [group]}


def _exact(seconds: float) -> str:
    return f"{round(1e3 * seconds)}ms" if seconds < 1 else f"{seconds:g}s"
