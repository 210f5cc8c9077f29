"""Prometheus objects made from the table in `contracts.metrics`, in a registry of our own."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from contracts.metrics import Kind, Metric


class Telemetry:
    """Metrics appear with their first use, so that ingress and ranks don't show each other's."""

    def __init__(self) -> None:
        disable_created_metrics()  # no `_created` series beside every counter
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}

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

    def exposition(self) -> str:
        """All metrics in Prometheus text format."""
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
