"""Prometheus recording rules and alerts, generated into `dashboards/rules/`.

docs/runbooks.md has a section for each alert, whose instructions are the alert's description.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from contracts import metrics
from dashboards.objectives import OBJECTIVES

RUNBOOKS = Path(__file__).parents[1] / "docs/runbooks.md"  # of a clone: packages have the results
MIN_FAILURES = 5  # a single failure of a quiet server alerts no one
MIN_BATCHES = 64  # after which the models have adapted
INTERVAL = "15s"
_UP = 'up{job="tandem"}'


class Alert(NamedTuple):
    """An alert. section: heading in docs/runbooks.md. lasts: how long the condition must hold."""

    name: str
    expression: str
    lasts: str | None
    severity: str
    section: str
    summary: str


def recording_rules() -> dict[str, str]:
    """Return recorded series → PromQL."""
    found = {
        burn_series(objective.name, window): objective.burn(window)
        for objective in OBJECTIVES
        for window in ("5m", "30m", "1h", "6h")
    }
    requests, stage = metrics.REQUESTS.name, metrics.STAGE.name
    predicted, measured = metrics.PLAN_PREDICTED.name, metrics.PLAN_MEASURED.name
    return found | {
        "cluster:tandem_requests:rate1m": (
            f'sum by (cluster, pipeline, class) (rate({requests}{{outcome="ok"}}[1m]))'
        ),
        "cluster:tandem_prediction_error:ratio": (
            f"abs(max by (cluster) ({predicted}) / max by (cluster) ({measured}) - 1) "
            f"and on (cluster) {_batches('5m')} > 0"
        ),
        "rank:tandem_saturation_fill:ratio": (
            f"max by (cluster, rank) ({metrics.LOAD.name}) / "
            f"max by (cluster, rank) ({metrics.SATURATION.name})"
        ),
        "rank:tandem_stage_seconds:rate1m": (
            f"sum by (cluster, rank, stage) (rate({stage}_sum[1m]))"
        ),
        "cluster:tandem_be_time_to_first_token_seconds:p95": (
            "histogram_quantile(0.95, sum by (cluster, le) "
            f'(rate({metrics.TTFT.name}_bucket{{class="be"}}[5m])))'
        ),
    }


def _batches(window: str) -> str:
    """Return PromQL for the batches of a cluster in `window`; gauges keep the latest batch."""
    return f"sum by (cluster) (increase({metrics.PLAN_BATCHES.name}[{window}]))"


def burn_series(objective: str, window: str) -> str:
    return f"cluster:tandem_{objective}_burn:ratio_{window}"


def alerts() -> list[Alert]:
    return [*_burn_rates(), *_rank_alerts(), *_work_alerts()]


def _burn_rates() -> list[Alert]:
    """Return alerts that require both windows: no firing on a short peak, or after its end.

    They also require MIN_FAILURES in the long window, and a server that still runs.
    """
    found = []
    for objective in OBJECTIVES:
        for speed, short_window, long_window, burn, lasts, severity in (
            ("Fast", "5m", "1h", 14.4, "2m", "page"),
            ("Slow", "30m", "6h", 6.0, "15m", "ticket"),
        ):
            short, long = (burn_series(objective.name, one) for one in (short_window, long_window))
            found.append(
                Alert(
                    f"Tandem{objective.name.capitalize()}Burns{speed}",
                    f"{short} > {burn:g} and {long} > {burn:g} "
                    f"and on (cluster) {objective.failures(long_window)} > {MIN_FAILURES} "
                    f"and on (cluster) count by (cluster) ({objective.total})",
                    lasts,
                    severity,
                    "Error budget burns",
                    f"{objective.promise}: error budget burns at least {burn:g} times too fast",
                )
            )
    return found


def _rank_alerts() -> list[Alert]:
    """Return alerts on processes. An orderly stop removes its targets, and so its series."""
    used = f'{metrics.KV_BLOCKS.name}{{state="used"}}'
    return [
        Alert(
            "TandemServerDown",
            f"max by (cluster) ({_UP}) == 0 "
            f"and on (cluster) max by (cluster) (max_over_time({_UP}[24h])) == 1",
            "5m",
            "page",
            "Server down",
            "No process of {{ $labels.cluster }} can be scraped",
        ),
        Alert(
            "TandemRankDown",
            f"max by (cluster, group, rank) ({metrics.RANK_UP.name}) == 0",
            "30s",
            "page",
            "Rank down",
            "{{ $labels.rank }} is not available",
        ),
        Alert(
            "TandemEpochFlaps",
            f"max by (cluster, group) (changes({metrics.RANK_RESTARTS.name}[15m])) > 2",
            None,
            "page",
            "Group epoch flaps",
            "Group {{ $labels.group }} was reformed {{ $value }} times in 15 minutes",
        ),
        Alert(
            "TandemScrapeMissing",
            f"{_UP} == 0",
            "15m",  # behind a proxy a server that loads does not answer
            "ticket",
            "Scrape missing",
            "Prometheus cannot scrape {{ $labels.instance }}",
        ),
        Alert(
            "TandemBlocksLeak",
            f"max by (cluster, rank) (min_over_time({used}[10m])) > 0 and on (cluster, rank) "
            f"max by (cluster, rank) (max_over_time({metrics.RANK_BUSY.name}[10m])) < 0.01",
            "5m",
            "ticket",
            "KV block leak",
            "KV blocks of {{ $labels.rank }} are in use although it is idle",
        ),
    ]


def _work_alerts() -> list[Alert]:
    fill, error = "rank:tandem_saturation_fill:ratio", "cluster:tandem_prediction_error:ratio"
    first, bound = "cluster:tandem_be_time_to_first_token_seconds:p95", metrics.OBJECTIVE.name
    queue = metrics.REQUESTS_WAITING.name
    rejected = f'{metrics.REQUESTS.name}{{pipeline="prefill", outcome="overload"}}'
    spent_s, ended = (
        f'sum by (cluster) (rate({metrics.E2E_LATENCY.name}_{of}{{pipeline="prefill"}}[5m]))'
        for of in ("sum", "count")
    )
    return [
        Alert(
            "TandemSaturationLost",
            f"max_over_time({fill}[5m]) < 0.5 and on (cluster) "
            f'sum by (cluster) (min_over_time({queue}{{pipeline="prefill"}}[5m])) > 16 '
            # otherwise they are short prompts, which are answered at once
            f"and on (cluster) (max by (cluster) (min_over_time({fill}[5m])) > 1 "
            f"or sum by (cluster) (increase({rejected}[5m])) > {MIN_FAILURES} "
            f"or {spent_s} / {ended} > 1)",
            "2m",
            "ticket",
            "Saturation lost",
            "{{ $labels.rank }} has less than half of its saturating work while prompts wait "
            "elsewhere, for over a second, or are rejected",
        ),
        Alert(
            "TandemPredictionsOff",
            f"avg_over_time({error}[5m]) > 0.5 and on (cluster) {_batches('10m')} > {MIN_BATCHES}",
            "10m",
            "ticket",
            "Inaccurate predictions",
            "Predicted batch times differ by {{ $value | humanizePercentage }} on average",
        ),
        Alert(
            "TandemBestEffortNearBound",
            f'{first} > on (cluster) 0.8 * max by (cluster) ({bound}{{objective="be_wait"}})',
            "10m",  # longer than the window, in which one request would do
            "ticket",
            "Best effort near its limit",
            "Best-effort requests wait {{ $value | humanizeDuration }} for a first token (p95)",
        ),
    ]


def recording_file() -> dict[str, Any]:
    rules = [{"record": series, "expr": promql} for series, promql in recording_rules().items()]
    return _file("tandem-recorded", rules)


def alerts_file(docs_url: str | None = None) -> dict[str, Any]:
    """Return the contents of the file of alerts. docs_url: where docs/ is published by mkdocs."""
    found = _runbooks()
    rules = [_rule(alert, found[alert.section], docs_url) for alert in alerts()]
    return _file("tandem-alerts", rules)


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
    return section.lower().replace(" ", "-")


def _rule(alert: Alert, runbook: str, docs_url: str | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.lasts is not None:
        rule["for"] = alert.lasts
    annotations = {"summary": alert.summary, "description": runbook}
    if docs_url is not None:
        page = f"{docs_url.rstrip('/')}/runbooks/#{anchor(alert.section)}"
        annotations["runbook_url"] = page
    return rule | {"labels": {"severity": alert.severity}, "annotations": annotations}


def _file(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"groups": [{"name": name, "interval": INTERVAL, "rules": rules}]}
