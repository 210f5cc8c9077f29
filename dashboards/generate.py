"""Writes the dashboards that show what a running cluster exports, `dashboards/NAME.json` each, and
Prometheus's rules, in `dashboards/rules/`.

    python -m dashboards.generate

What of a metric is drawn, it says itself in contracts/metrics.py; panels stand in the order of that
table, behind those of dashboards/boards.py that are made of several metrics. Needs Grafana's SDK,
which is in the extra `test`.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from dashboards.boards import board_specs
from dashboards.grafana import board_json
from dashboards.rules import alerts_file, recording_file

FOLDER = Path(__file__).parent
HEAD = "# Made by `python -m dashboards.generate` of dashboards/rules.py.\n"


def texts() -> dict[Path, str]:
    """What is written where."""
    boards = {
        FOLDER / f"{spec.board.value}.json": json.dumps(board_json(spec), indent=1) + "\n"
        for spec in board_specs()
    }
    return boards | {
        FOLDER / "rules" / f"{name}.yml": HEAD + yaml.safe_dump(rules, sort_keys=False, width=100)
        for name, rules in (("recording", recording_file()), ("alerts", alerts_file()))
    }


def main() -> None:
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
