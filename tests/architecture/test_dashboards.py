"""Dashboards show what is declared and set, and every panel says what it means."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from contracts import metrics
from contracts.metrics import Board, Metric, MetricKind
from tests.architecture.support import ROOT, modules

FOLDER = ROOT / "dashboards"
SUFFIXES = {"bucket", "sum", "count"}
KNOWN = {metric.name: metric for metric in metrics.ALL}
TARGET_LABELS = {"cluster", "group", "rank"}  # a scrape gives every series these
GENERATE = "run `python -m dashboards.generate`"
with_sdk = pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None,
    reason="grafana-foundation-sdk is not installed: pip install -c constraints.txt -e '.[test]'",
)


@with_sdk
def test_what_is_stored_is_what_is_generated() -> None:
    from dashboards.generate import texts

    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: {GENERATE}"


@with_sdk
@pytest.mark.parametrize("board", Board)
def test_grafanas_own_types_take_a_dashboard_and_give_it_back(board: Board) -> None:
    from grafana_foundation_sdk.builders.prometheus import Dataquery  # noqa: F401 - is registered
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    stored = _stored(board)
    read = Dashboard.from_json(stored)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == stored


@pytest.mark.parametrize("board", Board)
def test_every_panel_has_a_unit_levels_and_a_description(board: Board) -> None:
    for panel in _panels(board):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert defaults["unit"], title
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None, title
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(values), title
        has_none = "No level of it is bad" in panel["description"]
        assert has_none == (len(steps) == 1), f"{title}: give it levels, or none"
        assert panel["description"].replace("No level of it is bad by itself.", "").strip(), title
        assert panel["targets"], title


@pytest.mark.parametrize("board", Board)
def test_no_two_panels_lie_on_each_other_or_share_a_title(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    titles = [panel["title"] for panel in _panels(board)]
    assert len(titles) == len(set(titles))
    for panel in _stored(board)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("board", Board)
def test_a_dashboard_opens_without_a_click_and_can_be_narrowed(board: Board) -> None:
    source, *others = _stored(board)["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert [one["name"] for one in others] == ["cluster", "group", "rank"]
    assert all(one["allValue"] == ".*" for one in others)  # series without that label too
    for expression in expressions(board):
        assert expression.count("tandem_") == expression.count('cluster=~"$cluster"'), expression


def test_provisioning_files_name_the_folder_that_holds_the_dashboards() -> None:
    [provider] = _yaml("provisioning/dashboards.yaml")["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] in (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    [source] = _yaml("provisioning/datasources.yaml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]


def test_dashboards_show_only_metrics_that_are_declared_and_exported() -> None:
    exported = _exported_metrics()
    for board in Board:
        for expression in expressions(board):
            used = [_metric(name) for name in re.findall(r"tandem_\w+", expression)]
            assert used, expression
            for metric in used:
                assert metric.name in exported, f"{metric.name} is declared, but nothing sets it"
            known = {"le", *TARGET_LABELS, *(label for metric in used for label in metric.labels)}
            grouped = {
                label
                for by in re.findall(r"by \(([^)]*)\)", expression)
                for label in by.split(", ")
            }
            assert grouped <= known, expression


def test_every_metric_that_is_exported_has_a_panel() -> None:
    shown = " ".join(expression for board in Board for expression in expressions(board))
    missing = {name for name in _exported_metrics() if name not in shown}
    assert not missing, f"give them a panel in contracts/metrics.py, and {GENERATE}"


def _stored(board: Board) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((FOLDER / f"{board}.json").read_text(encoding="utf-8"))
    return stored


def _yaml(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return read


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    return (panel for panel in _stored(board)["panels"] if panel["type"] != "row")


def expressions(board: Board) -> list[str]:
    """PromQL of all its panels."""
    return [target["expr"] for panel in _panels(board) for target in panel["targets"]]


def _metric(name: str) -> Metric:
    """The declared metric behind a series name; a histogram's series have a suffix."""
    stem, _, suffix = name.rpartition("_")
    if suffix in SUFFIXES and stem in KNOWN and KNOWN[stem].kind is MetricKind.HISTOGRAM:
        return KNOWN[stem]
    assert name in KNOWN, f"{name} is not in contracts/metrics.py"
    assert KNOWN[name].kind is not MetricKind.HISTOGRAM, (
        f"{name} is a histogram: it has no such series"
    )
    return KNOWN[name]


def _exported_metrics() -> set[str]:
    """Metrics that code in actors/ or cluster/ mentions as `metrics.NAME`."""
    found = set()
    for path, tree in modules().items():
        if not path.startswith(("actors/", "cluster/")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = getattr(metrics, node.attr, None)
                if node.value.id == "metrics" and isinstance(value, Metric):
                    found.add(value.name)
    return found
