"""Generate the Grafana dashboards (`dashboards/NAME.json`) and the Prometheus rules.

    python -m dashboards.generate

Panels are in `dashboards/*.py`, a file per board. Requires Grafana's SDK (extra `test`).
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from dashboards.bulk import BULK
from dashboards.capacity import CAPACITY
from dashboards.grafana import board_json
from dashboards.latency import LATENCY
from dashboards.pipeline import PIPELINE
from dashboards.rules import alerts_file, recording_file

FOLDER = Path(__file__).parent
HEAD = "# Generated from dashboards/rules.py by `python -m dashboards.generate`.\n"
BOARDS = (CAPACITY, LATENCY, PIPELINE, BULK)


def texts() -> dict[Path, str]:
    """Return path → contents of every generated file."""
    boards = {
        FOLDER / f"{spec.board.value}.json": json.dumps(board_json(spec), indent=1) + "\n"
        for spec in BOARDS
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
