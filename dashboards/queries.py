"""PromQL of what a dashboard draws, and panels as data: what `dashboards/grafana.py` makes JSON of,
and what tests ask a Prometheus for.

Every series is chosen by the dashboards' variables: cluster; and rank and group where a rank sets
it. A series without such a label is in "All", whose pattern matches nothing too.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.metrics import Metric, MetricKind, Panel, PanelView

WINDOW = "$__rate_interval"
OF_CLUSTER = 'cluster=~"$cluster"'
OF_RANK = 'cluster=~"$cluster", group=~"$group", rank=~"$rank"'

_VIEWS = {
    PanelView.RATE: "sum{by} (rate({name}{where}[{window}]))",
    PanelView.SUM: "sum{by} ({name}{where})",
    PanelView.MAX: "max{by} ({name}{where})",
    PanelView.TIME: "sum{by} (rate({name}_sum{where}[{window}]))",
}
_DEFAULTS = {
    MetricKind.COUNTER: PanelView.RATE,
    MetricKind.GAUGE: PanelView.SUM,
    MetricKind.HISTOGRAM: PanelView.QUANTILES,
}


class PromQuery(NamedTuple):
    expression: str  # PromQL
    legend: str


class PanelSpec(NamedTuple):
    """A panel. unit: Grafana's name of it. warn, bad: as in `contracts.metrics.Panel`. is_stat: a
    large number of now, not lines over time."""

    title: str
    unit: str
    description: str
    queries: tuple[PromQuery, ...]
    warn: float | None = None
    bad: float | None = None
    is_stat: bool = False


class PanelRow(NamedTuple):
    title: str
    panels: tuple[PanelSpec, ...]


def panel_spec(title: str, shown: list[tuple[Metric, Panel]]) -> PanelSpec:
    """The panel of one title, of all the metrics that are shown in it."""
    first = shown[0][1]
    lines = [query for metric, panel in shown for query in queries(metric, panel)]
    helps = dict.fromkeys(metric.help for metric, _ in shown)
    return PanelSpec(title, first.unit, " ".join(helps), tuple(lines), first.warn, first.bad)


def queries(metric: Metric, panel: Panel) -> list[PromQuery]:
    """What Grafana asks Prometheus for, a line or more each."""
    legend = " ".join([panel.legend, *(f"{{{{{label}}}}}" for label in panel.by)]).strip()
    view = panel.view or _DEFAULTS[metric.kind]
    where = _where(metric, panel)
    if view is PanelView.QUANTILES:
        by = ", ".join(("le", *panel.by))
        inner = f"sum by ({by}) (rate({metric.name}_bucket{where}[{WINDOW}]))"
        return [
            PromQuery(f"histogram_quantile({q}, {inner})", f"{name} {legend}".strip())
            for q, name in ((0.5, "p50"), (0.95, "p95"))
        ]
    line = _line(view, metric.name, where, panel)
    whole = f" / {_line(view, panel.share_of, where, panel)}" if panel.share_of else ""
    return [PromQuery(f"{line}{whole}", legend)]


def _line(view: PanelView, name: str, where: str, panel: Panel) -> str:
    by = f" by ({', '.join(panel.by)})" if panel.by else ""
    return _VIEWS[view].format(by=by, name=name, where=where, window=WINDOW)


def _where(metric: Metric, panel: Panel) -> str:
    chosen = OF_RANK if "rank" in metric.labels else OF_CLUSTER
    return "{" + ", ".join(part for part in (panel.where, chosen) if part) + "}"
