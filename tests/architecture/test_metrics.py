"""Every declared metric is updated, and nothing else is exported."""

import ast
import functools

import pytest

from contracts import metrics
from contracts.metrics import Metric, MetricKind
from tests.architecture.support import modules

DECLARED = {name: one for name, one in vars(metrics).items() if isinstance(one, Metric)}
SETTERS = {  # of `Telemetry`
    MetricKind.COUNTER: {"count", "read", "read_each"},
    MetricKind.GAUGE: {"set", "read", "read_each"},
    MetricKind.HISTOGRAM: {"observe", "_observe", "buffered_observer"},
}
LABELS_OF_TARGETS = {
    "cluster",
    "node",
    "instance",
    "job",
}  # theirs alone: dashboards/prometheus.yml


@functools.cache
def _set_metrics() -> dict[str, set[str]]:
    """Return metric name → `Telemetry` methods that update it in product code."""
    found: dict[str, set[str]] = {}
    for path, tree in modules().items():
        if not path.startswith(("actors/", "cluster/")):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Attribute) and ast.unparse(first.value) == "metrics":
                found.setdefault(first.attr, set()).add(_method(node.func))
    return found


def _method(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


@pytest.mark.parametrize("name", DECLARED)
def test_every_declared_metric_is_updated(name: str) -> None:
    methods = _set_metrics().get(name, set())
    assert methods & SETTERS[DECLARED[name].kind], f"{name} is declared, but nothing sets it"


def test_updated_metrics_are_declared() -> None:
    unknown = {
        name
        for name, methods in _set_metrics().items()
        if name not in DECLARED and methods & set().union(*SETTERS.values())
    }
    assert not unknown
    assert set(DECLARED.values()) == set(metrics.ALL)


def test_prometheus_client_is_used_in_telemetry_only() -> None:
    for path, tree in modules().items():
        if not path.startswith(("actors/", "cluster/", "models/", "kernels/", "planner/")):
            continue
        for node in ast.walk(tree):
            name = node.module if isinstance(node, ast.ImportFrom) else None
            if name in ("prometheus_client", "prometheus_client.openmetrics.exposition"):
                assert path == "actors/telemetry/telemetry.py"
            if name == "prometheus_client.exposition":
                assert path == "actors/telemetry/exporter.py"


def test_metrics_have_no_target_labels() -> None:
    for metric in metrics.ALL:
        assert not LABELS_OF_TARGETS & set(metric.labels), metric.name
