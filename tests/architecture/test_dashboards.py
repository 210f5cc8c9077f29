"""Dashboards show declared metrics, and each panel has a unit, a description and a plain title."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from contracts import metrics
from contracts.metrics import Metric, MetricKind
from dashboards.panels import Board
from tests.architecture.budgets import BANNED_WORDS
from tests.architecture.support import ROOT, modules

FOLDER = ROOT / "dashboards"
SUFFIXES = {"bucket", "sum", "count"}
KNOWN = {metric.name: metric for metric in metrics.ALL}
TARGET_LABELS = {"cluster", "group", "rank"}  # set by Prometheus for every series
MAX_SHOWN, MAX_TITLE = 12, 45
TITLE_WORDS = set(
    """anything come could given hold knee let made makes nothing parked promised so something
    that there these things they this those turnaround up waited what where which""".split()  # noqa: SIM905
)
GENERATE = "run `python -m dashboards.generate`"
with_sdk = pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None,
    reason="grafana-foundation-sdk is not installed: pip install -c constraints.txt -e '.[test]'",
)


@with_sdk
def test_stored_files_are_the_generated_ones() -> None:
    from dashboards.generate import texts

    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: {GENERATE}"


@with_sdk
@pytest.mark.parametrize("board", Board)
def test_dashboard_round_trips_through_grafana_types(board: Board) -> None:
    from grafana_foundation_sdk.builders.prometheus import Dataquery  # noqa: F401 - is registered
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    stored = _stored(board)
    read = Dashboard.from_json(stored)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == stored


@pytest.mark.parametrize("board", Board)
def test_every_panel_has_a_description_a_unit_and_an_action(board: Board) -> None:
    for panel in _panels(board):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert re.fullmatch(
            r"[A-Z].+\. Unit: .+\. What to do: .+\.", panel["description"], re.DOTALL
        ), title
        assert all(defaults[key] for key in ("unit", "noValue")), title
        values = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert values[0] is None, title
        assert values[1:] == sorted(values[1:]), title
        assert panel["targets"], title


@pytest.mark.parametrize("board", Board)
def test_panel_titles_are_short_plain_and_unique(board: Board) -> None:
    titles = [panel["title"] for panel in _panels(board)]
    assert len(titles) == len(set(titles))
    for title in titles:
        words = set(re.findall(r"[a-z]+", title.lower()))
        assert not words & (BANNED_WORDS | TITLE_WORDS), title
        assert not re.search(r"[a-z]\.[a-z]|, |seconds per second", title), title  # no config keys
        assert len(title) <= MAX_TITLE, title


@pytest.mark.parametrize("board", Board)
def test_board_shows_at_most_twelve_panels_until_a_row_is_expanded(board: Board) -> None:
    shown = [panel for panel in _stored(board)["panels"] if panel["type"] != "row"]
    assert 0 < len(shown) <= MAX_SHOWN


@pytest.mark.parametrize("board", Board)
def test_panels_do_not_overlap(board: Board) -> None:
    top = _stored(board)["panels"]
    for panels in (top, *(row.get("panels", []) for row in top if row["type"] == "row")):
        taken: set[tuple[int, int]] = set()
        for panel in panels:
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
def test_every_series_is_selected_by_the_dashboard_variables(board: Board) -> None:
    source, *others = _stored(board)["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert [one["name"] for one in others] == ["cluster", "group", "rank"]
    assert all(one["allValue"] == ".*" for one in others)  # series without that label too
    for expression in expressions(board):
        assert expression.count("tandem_") == expression.count('cluster=~"$cluster"'), expression


def test_panels_named_in_runbooks_exist() -> None:
    text = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
    named = re.findall(r'\*(Capacity|Objectives|Pipeline|Bulk)\*, "([^"]+)"', text)
    assert named
    for board, title in named:
        assert title in {panel["title"] for panel in _panels(Board(board.lower()))}, title


def test_provisioning_files_name_the_dashboard_folder() -> None:
    [provider] = _yaml("provisioning/dashboards.yaml")["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] in (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    [source] = _yaml("provisioning/datasources.yaml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]


def test_dashboards_use_only_exported_metrics_and_their_labels() -> None:
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


def test_every_exported_metric_has_a_panel() -> None:
    shown = " ".join(expression for board in Board for expression in expressions(board))
    missing = {name for name in _exported_metrics() if name not in shown}
    assert not missing, f"give them a panel in dashboards/, and {GENERATE}"


def _stored(board: Board) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((FOLDER / f"{board}.json").read_text(encoding="utf-8"))
    return stored


def _yaml(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return read


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    """Yield all panels of a board, those of collapsed rows included."""
    for panel in _stored(board)["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def expressions(board: Board) -> list[str]:
    """Return the PromQL of all panels."""
    return [target["expr"] for panel in _panels(board) for target in panel["targets"]]


def _metric(name: str) -> Metric:
    """Return the metric of a series name; series of a histogram have a suffix."""
    stem, _, suffix = name.rpartition("_")
    if suffix in SUFFIXES and stem in KNOWN and KNOWN[stem].kind is MetricKind.HISTOGRAM:
        return KNOWN[stem]
    assert name in KNOWN, f"{name} is not in contracts/metrics.py"
    assert KNOWN[name].kind is not MetricKind.HISTOGRAM, (
        f"{name} is a histogram: it has no such series"
    )
    return KNOWN[name]


def _exported_metrics() -> set[str]:
    """Return metrics that code in actors/ or cluster/ refers to as `metrics.NAME`."""
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
