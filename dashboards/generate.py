"""Generate the Grafana dashboards (`dashboards/NAME.json`) and the Prometheus rules.

    python -m dashboards.generate [--docs-url URL]

--docs-url: where you publish docs/ (`make docs`), for the alerts' runbook_url. Panels are in
`dashboards/*.py`, a file per board. Requires Grafana's SDK (extra `test`), which makes JSON for
Grafana 11 and newer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphThresholdsStyleMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)

from contracts import metrics
from dashboards.bulk import BULK
from dashboards.capacity import CAPACITY
from dashboards.latency import LATENCY
from dashboards.panels import BoardSpec, PanelRow, PanelSpec
from dashboards.pipeline import PIPELINE
from dashboards.rules import alerts_file, prometheus_rule, recording_file

FOLDER = Path(__file__).parent
KUBERNETES = FOLDER.parent / "deploy/kubernetes/monitoring"
HEAD = "# Generated from dashboards/rules.py by `python -m dashboards.generate`.\n"
BOARDS = (CAPACITY, LATENCY, PIPELINE, BULK)

_SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_WIDTH, _HEIGHT, _STAT_HEIGHT, _COLUMNS = 8, 8, 4, 24
_VARIABLES = ("cluster", "group", "rank")


def board_json(page: BoardSpec) -> dict[str, Any]:
    """Return a dashboard with variables for the data source, cluster, group and rank."""
    board = (
        dashboard.Dashboard(f"Tandem: {page.board.value}")
        .uid(f"tandem-{page.board.value}")
        .description(page.description)
        .tags(["tandem"])
        .editable()
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .link(_board_links())
        .with_variable(
            dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus")
        )
    )
    for name in _VARIABLES:
        board = board.with_variable(_variable(name))
    number, y = 1, 0
    for row in page.rows:
        header = dashboard.Row(row.title).id(number).grid_pos(GridPos(1, 24, 0, y))
        panels, end_y = _row_panels(row, number + 1, y + 1)
        if row.collapsed:
            for panel in panels:
                header = header.with_panel(panel)
            board = board.with_row(header)
        else:
            board = board.with_row(header)
            for panel in panels:
                board = board.with_panel(panel)
        number, y = number + 1 + len(panels), y + 1 if row.collapsed else end_y
    made: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    return made


def _row_panels(row: PanelRow, number: int, y: int) -> tuple[list[Any], int]:
    """Return the panels of a row, numbered from `number`, and the line below them."""
    height = _STAT_HEIGHT if row.panels[0].is_stat else _HEIGHT
    columns = _COLUMNS // _WIDTH
    panels = [
        _panel(
            panel,
            number + index,
            GridPos(height, _WIDTH, index % columns * _WIDTH, y + index // columns * height),
        )
        for index, panel in enumerate(row.panels)
    ]
    return panels, y + -(-len(panels) // columns) * height


def _board_links() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Tandem")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["tandem"])
        .include_vars(True)
        .keep_time(True)
    )


def _variable(name: str) -> dashboard.QueryVariable:
    """Return a variable whose value "All" also matches series without the label."""
    of = metrics.RANK_BUSY.name if name != "cluster" else metrics.GROUP_EPOCH.name
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query({"query": f"label_values({of}, {name})", "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(spec: PanelSpec, number: int, place: GridPos) -> stat.Panel | timeseries.Panel:
    panel: Any = stat.Panel() if spec.is_stat else _lines()
    for index, query in enumerate(spec.queries):
        panel = panel.with_target(
            prometheus.Dataquery()
            .expr(query.expression)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + index))
            .datasource(_SOURCE)
        )
    if not spec.is_signed:
        panel = panel.min(0)
    made: stat.Panel | timeseries.Panel = (
        panel.title(spec.title)
        .id(number)
        .description(spec.description)
        .datasource(_SOURCE)
        .unit(spec.unit.grafana)
        .no_value("No traffic, or the feature is off")
        .thresholds(
            dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(_steps(spec.levels))
        )
        .grid_pos(place)
    )
    return made


def _lines() -> timeseries.Panel:
    return (
        timeseries.Panel()
        .fill_opacity(10)
        .thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    )


def _steps(levels: tuple[float, float] | None) -> list[Threshold]:
    if levels is None:
        return [Threshold(value=None, color="green")]
    warn, bad = levels
    if warn < bad:
        steps = ((None, "green"), (warn, "yellow"), (bad, "red"))
    else:
        steps = ((None, "red"), (bad, "yellow"), (warn, "green"))
    return [Threshold(value=value, color=color) for value, color in steps]


def texts(docs_url: str | None = None) -> dict[Path, str]:
    """Return path → contents of every generated file."""
    boards = {
        FOLDER / f"{spec.board.value}.json": json.dumps(board_json(spec), indent=1) + "\n"
        for spec in BOARDS
    }
    recording, alerts = recording_file(), alerts_file(docs_url=docs_url)
    rules = {
        FOLDER / "rules/recording.yml": recording,
        FOLDER / "rules/alerts.yml": alerts,
        KUBERNETES / "rules.yaml": prometheus_rule(recording, alerts),
    }
    return boards | {
        path: HEAD + yaml.safe_dump(rule, sort_keys=False, width=100)
        for path, rule in rules.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate dashboards and rules.")
    parser.add_argument("--docs-url", metavar="URL", help="address of the documentation")
    for path, text in texts(parser.parse_args().docs_url).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
