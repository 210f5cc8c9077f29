"""Boards, rows and panels as data, and the PromQL of their lines.

`dashboards/generate.py` makes JSON of them. The dashboard variables select every series: cluster,
and rank and group if a rank exports it. "All" matches series without such a label as well, so that
every expression keeps the label cluster: no value mixes two clusters.
"""

import enum
from typing import NamedTuple

from contracts.metrics import Metric

WINDOW = "$__rate_interval"
OF_CLUSTER = 'cluster=~"$cluster"'
OF_RANK = 'cluster=~"$cluster", group=~"$group", rank=~"$rank"'


class Board(enum.StrEnum):
    """Dashboards; each is a file `dashboards/NAME.json`."""

    CAPACITY = "capacity"
    OBJECTIVES = "objectives"
    PIPELINE = "pipeline"
    BULK = "bulk"


class Unit(NamedTuple):
    """A unit. `grafana` is Grafana's id, `text` the name in the description."""

    grafana: str
    text: str


SECONDS = Unit("s", "seconds")
REQUESTS_PER_S = Unit("reqps", "requests per second")
TOKENS_PER_S = Unit("short", "tokens per second")
EVENTS_PER_S = Unit("ops", "events per second")
BYTES_PER_S = Unit("Bps", "bytes per second")
PERCENT = Unit("percentunit", "percent")
PERCENT_OF_TIME = Unit("percentunit", "percent of time")


class PromQuery(NamedTuple):
    """A PromQL expression and the legend of its lines."""

    expression: str
    legend: str


class PanelSpec(NamedTuple):
    """A panel.

    measures, action: description, and what to do about a bad value. levels: thresholds for yellow
    and red; the second is below the first if less is worse. is_stat: show the latest value as a
    number. is_signed: values may be negative.
    """

    title: str
    unit: Unit
    measures: str
    action: str
    queries: tuple[PromQuery, ...]
    levels: tuple[float, float] | None = None
    is_stat: bool = False
    is_signed: bool = False

    @property
    def description(self) -> str:
        return f"{self.measures} Unit: {self.unit.text}. What to do: {self.action}"


class PanelRow(NamedTuple):
    """Panels of one topic. Rows of features that are usually off are collapsed."""

    title: str
    panels: tuple[PanelSpec, ...]
    collapsed: bool = False


class BoardSpec(NamedTuple):
    board: Board
    description: str
    rows: tuple[PanelRow, ...]


def rate(metric: Metric, *by: str, where: str = "") -> str:
    """PromQL for the increase per second of a counter, summed over the labels not in `by`."""
    return f"sum{_grouped(by)} (rate({metric.name}{_selection(metric, where)}[{WINDOW}]))"


def time_share(metric: Metric, *by: str, where: str = "") -> str:
    """PromQL for the seconds per second in a histogram of seconds."""
    return f"sum{_grouped(by)} (rate({metric.name}_sum{_selection(metric, where)}[{WINDOW}]))"


def total(metric: Metric, *by: str, where: str = "") -> str:
    return f"sum{_grouped(by)} ({metric.name}{_selection(metric, where)})"


def largest(metric: Metric, *by: str, where: str = "") -> str:
    return f"max{_grouped(by)} ({metric.name}{_selection(metric, where)})"


def average(metric: Metric, *by: str, where: str = "") -> str:
    return f"avg{_grouped(by)} ({metric.name}{_selection(metric, where)})"


def line(expression: str, *labels: str, name: str = "") -> tuple[PromQuery, ...]:
    """Return a query whose legend is `name`, then the values of `labels` and the cluster."""
    legend = " ".join([name, *(f"{{{{{label}}}}}" for label in (*labels, "cluster"))]).strip()
    return (PromQuery(expression, legend),)


def quantiles(metric: Metric, *by: str, where: str = "") -> tuple[PromQuery, ...]:
    """Return queries for the median and the 95th percentile of a histogram."""
    selection = _selection(metric, where)
    inner = f"sum{_grouped((*by, 'le'))} (rate({metric.name}_bucket{selection}[{WINDOW}]))"
    return tuple(
        query
        for q, name in ((0.5, "p50"), (0.95, "p95"))
        for query in line(f"histogram_quantile({q}, {inner})", *by, name=name)
    )


def _grouped(by: tuple[str, ...]) -> str:
    return f" by ({', '.join(('cluster', *by))})"


def _selection(metric: Metric, where: str) -> str:
    chosen = OF_RANK if "rank" in metric.labels else OF_CLUSTER
    return "{" + ", ".join(part for part in (where, chosen) if part) + "}"
