"""Writes dashboards/serving.json, a Grafana dashboard of what a running cluster exports.

    python -m dashboards.generate

What of a metric is drawn, it says itself in contracts/metrics.py; panels stand in the order of that
table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from contracts.metrics import ALL, Kind, Metric, Panel, View

TARGET = Path(__file__).with_name("serving.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
WINDOW = "$__rate_interval"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


_VIEWS = {
    View.RATE: "sum{by} (rate({name}{where}[{window}]))",
    View.SUM: "sum{by} ({name}{where})",
    View.MAX: "max{by} ({name}{where})",
    View.GROWTH: "sum{by} (deriv({name}{where}[{window}]))",
    View.TIME: "sum{by} (rate({name}_sum{where}[{window}]))",
}
_DEFAULTS = {Kind.COUNTER: View.RATE, Kind.GAUGE: View.SUM, Kind.HISTOGRAM: View.QUANTILES}


class Query(NamedTuple):
    expression: str  # PromQL
    legend: str


def queries(metric: Metric, panel: Panel) -> list[Query]:
    """What Grafana asks Prometheus for, a line or more each."""
    legend = " ".join([panel.legend, *(f"{{{{{label}}}}}" for label in panel.by)]).strip()
    view = panel.view or _DEFAULTS[metric.kind]
    if view is View.QUANTILES:
        by = ", ".join(("le", *panel.by))
        inner = f"sum by ({by}) (rate({metric.name}_bucket[{WINDOW}]))"
        return [
            Query(f"histogram_quantile({q}, {inner})", f"{name} {legend}".strip())
            for q, name in ((0.5, "p50"), (0.95, "p95"))
        ]
    drawn = _drawn(view, metric.name, panel)
    whole = f" / {_drawn(view, panel.share_of, panel)}" if panel.share_of else ""
    return [Query(f"{drawn}{whole}", legend)]


def _drawn(view: View, name: str, panel: Panel) -> str:
    by = f" by ({', '.join(panel.by)})" if panel.by else ""
    where = f"{{{panel.where}}}" if panel.where else ""
    return _VIEWS[view].format(by=by, name=name, where=where, window=WINDOW)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; the Prometheus source is chosen there."""
    by_title: dict[str, list[tuple[Metric, Panel]]] = {}
    for metric in ALL:
        for panel in metric.panels:
            by_title.setdefault(panel.title, []).append((metric, panel))
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Tandem: serving",
        "uid": "tandem-serving",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(number, shown) for number, shown in enumerate(by_title.values())],
    }


def _panel(number: int, shown: list[tuple[Metric, Panel]]) -> dict[str, Any]:
    row, column = divmod(number, PER_ROW)
    first = shown[0][1]
    asked = [query for metric, panel in shown for query in queries(metric, panel)]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": first.title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": first.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.expression, "legendFormat": query.legend}
            for index, query in enumerate(asked)
        ],
    }


def main() -> None:
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
