"""Writes dashboards/serving.json, a Grafana dashboard of what a running cluster exports.

    python -m dashboards.generate

Panels refer to metrics by their objects in contracts/metrics.py, so that a renamed metric cannot
leave an empty panel behind. Rows: requests, tokens, ranks, memory and channels, plans, prefill
workers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from contracts import metrics
from contracts.metrics import Kind, Metric

TARGET = Path(__file__).with_name("serving.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
WINDOW = "$__rate_interval"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


class Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name of it
    queries: list[tuple[str, str]]  # PromQL, legend


def _by(*labels: str) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _rate(metric: Metric, *labels: str) -> tuple[str, str]:
    """Increase per second of a counter, summed over the labels that are not named."""
    assert metric.kind is Kind.COUNTER
    return f"sum{_by(*labels)} (rate({metric.name}[{WINDOW}]))", _legend(*labels)


def _quantiles(metric: Metric, *labels: str) -> list[tuple[str, str]]:
    """p50 and p95 of a histogram."""
    assert metric.kind is Kind.HISTOGRAM
    inner = f"sum{_by('le', *labels)} (rate({metric.name}_bucket[{WINDOW}]))"
    return [
        (f"histogram_quantile({q}, {inner})", f"{name} {_legend(*labels)}".strip())
        for q, name in ((0.5, "p50"), (0.95, "p95"))
    ]


def _seconds_per_second(metric: Metric, *labels: str) -> tuple[str, str]:
    """Seconds spent in a histogram's spans per second of time."""
    assert metric.kind is Kind.HISTOGRAM
    return f"sum{_by(*labels)} (rate({metric.name}_sum[{WINDOW}]))", _legend(*labels)


def _gauge(metric: Metric, *labels: str) -> tuple[str, str]:
    assert metric.kind is Kind.GAUGE
    return f"sum{_by(*labels)} ({metric.name})", _legend(*labels)


def _growth(metric: Metric, *labels: str) -> tuple[str, str]:
    """Increase per second of a gauge that only grows."""
    assert metric.kind is Kind.GAUGE
    return f"sum{_by(*labels)} (deriv({metric.name}[{WINDOW}]))", _legend(*labels)


def _legend(*labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def panels() -> list[Panel]:
    cached = f"sum by (pipeline) (rate({metrics.CACHED_TOKENS.name}[{WINDOW}]))"
    prompt = f"sum by (pipeline) (rate({metrics.PROMPT_TOKENS.name}[{WINDOW}]))"
    return [
        Panel("Requests by outcome", "reqps", [_rate(metrics.REQUESTS, "pipeline", "outcome")]),
        Panel("Time to first token", "s", _quantiles(metrics.TTFT, "class")),
        Panel("Turnaround", "s", _quantiles(metrics.TURNAROUND, "pipeline", "class")),
        Panel("Time per output token", "s", _quantiles(metrics.TPOT, "class")),
        Panel("Queue depth", "short", [_gauge(metrics.QUEUE_DEPTH, "pipeline", "class")]),
        Panel("Prompt tokens per second", "short", [_rate(metrics.PROMPT_TOKENS, "pipeline")]),
        Panel("Generated tokens per second", "short", [_rate(metrics.GENERATED_TOKENS, "class")]),
        Panel("Cached share of prompts", "percentunit", [(f"{cached} / {prompt}", "{{pipeline}}")]),
        Panel("Busy share of a rank", "percentunit", [_gauge(metrics.RANK_BUSY, "rank")]),
        Panel(
            "Seconds per second in each stage",
            "short",
            [_seconds_per_second(metrics.STAGE, "stage", "rank")],
        ),
        Panel("Stage duration, all ranks", "s", _quantiles(metrics.STAGE, "stage")),
        Panel(
            "Exposed communication, seconds per second",
            "short",
            [_growth(metrics.EXPOSED_COMMUNICATION, "rank")],
        ),
        Panel("KV blocks by state", "short", [_gauge(metrics.KV_BLOCKS, "rank", "state")]),
        Panel(
            "Channel payload sent", "Bps", [_rate(metrics.CHANNEL_BYTES, "direction", "backend")]
        ),
        Panel(
            "Makespan of the latest planned batch, predicted and measured",
            "s",
            [
                (metrics.PLAN_PREDICTED.name, "predicted"),
                (metrics.PLAN_MEASURED.name, "measured"),
            ],
        ),
        Panel(
            "Batches by who chose the plan",
            "ops",
            [_rate(metrics.PLAN_BATCHES, "chosen_by", "reason")],
        ),
        Panel("Time to find the latest plan", "s", [(metrics.PLAN_SOLVE.name, "solve")]),
        Panel(
            "Epoch of a group",
            "short",
            [(f"max by (group) ({metrics.GROUP_EPOCH.name})", _legend("group"))],
        ),
        *_prefill_panels(),
    ]


def _prefill_panels() -> list[Panel]:
    """Of the prefill workers: what the router goes by, and what moving weights costs."""
    threshold, load = metrics.SATURATION.name, metrics.LOAD.name
    moved = f'{metrics.STAGE.name}_sum{{stage=~"gather|host_copy"}}'
    return [
        Panel(
            "Work at a prefill worker, FLOPs",
            "short",
            [(f"max by (rank) ({load})", "{{rank}}")],
        ),
        Panel(
            "Work as a share of the saturation threshold",
            "percentunit",
            [(f"max by (rank) ({load}) / max by (rank) ({threshold})", "{{rank}}")],
        ),
        Panel(
            "Weights waited for, seconds per second",
            "short",
            [(f"sum by (stage, rank) (rate({moved}[{WINDOW}]))", "{{stage}} {{rank}}")],
        ),
        Panel(
            "Model FLOPs utilization",
            "percentunit",
            [_gauge(metrics.MODEL_FLOPS_UTILIZATION, "rank")],
        ),
        Panel("Replaced ranks per second", "ops", [_rate(metrics.RANK_RESTARTS, "group")]),
    ]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; the Prometheus source is chosen there."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Tandem: serving",
        "uid": "tandem-serving",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels())],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, PER_ROW)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
