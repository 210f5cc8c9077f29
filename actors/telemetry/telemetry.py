"""Prometheus objects made from the table in `contracts.metrics`, in a registry of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from contracts.metrics import Kind, Metric

Totals = dict[tuple[str, ...], float]  # by labels
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Telemetry:
    """Metrics appear with their first use, so that ingress and ranks don't show each other's."""

    def __init__(self) -> None:
        disable_created_metrics()  # no `_created` series beside every counter
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}
        self._readings: list[tuple[Counter | Gauge, Callable[[], float]]] = []
        self._totals: list[tuple[Metric, Callable[[], Totals]]] = []
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}  # of these totals

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Counter)
        child.inc(by)

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Gauge)
        child.set(to)

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        child.observe(value)

    def read(self, metric: Metric, *labels: str, of: Callable[[], float]) -> None:
        """Asks `of` at each exposition: for a gauge's value, or how much a counter has grown."""
        child = self._child(metric, labels)
        assert isinstance(child, Counter | Gauge)
        self._readings.append((child, of))

    def read_each(self, counter: Metric, of: Callable[[], Totals]) -> None:
        """Asks `of` at each exposition for totals by labels, of which more may appear."""
        self._totals.append((counter, of))

    def exposition(self) -> str:
        """All metrics in Prometheus text format."""
        for child, of in self._readings:
            if isinstance(child, Counter):
                child.inc(of())
            else:
                child.set(of())
        for metric, totals in self._totals:
            for labels, total in totals().items():
                before = self._counted.get((metric.name, labels), 0.0)
                self._counted[metric.name, labels] = total
                self.count(metric, *labels, by=total - before)
        text: bytes = generate_latest(self._registry)
        return text.decode()

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Gauge | Histogram:
        """The object for these label values, found by one dictionary look-up after the first."""
        key = (metric.name, labels)
        child = self._children.get(key)
        if child is None:
            family = self._family(metric)
            child = self._children[key] = family.labels(*labels) if metric.labels else family
        return child

    def _family(self, metric: Metric) -> Counter | Gauge | Histogram:
        family = self._families.get(metric.name)
        if family is None:
            family = self._families[metric.name] = _make(metric, self._registry)
        return family


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind is Kind.COUNTER:
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(
        metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
    )


def merge_expositions(texts: Iterable[str]) -> str:
    """One exposition from several: each family and each series once, since Prometheus refuses a
    page that declares one twice. Series with equal labels are added up, gauges keep the largest.
    Families and series stand in the order of their first appearance.
    """
    headers: dict[str, dict[str, str]] = {}
    series: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, family, *_ = line.split(" ", 3)
                headers.setdefault(family, {}).setdefault(keyword, line)
            elif line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values = series.setdefault(family, {})
                is_gauge = headers.get(family, {}).get("TYPE", "").endswith(" gauge")
                values[name] = _combined(values.get(name), float(value), is_gauge)
    lines: list[str] = []
    for family in {**headers, **series}:
        lines.extend(headers.get(family, {}).values())
        lines.extend(f"{name} {value}" for name, value in series.get(family, {}).items())
    return "".join(f"{line}\n" for line in lines)


def _combined(before: float | None, value: float, is_gauge: bool) -> float:
    if before is None:
        return value
    return max(before, value) if is_gauge else before + value
