"""Generate the Grafana dashboards (`dashboards/NAME.json`) and the Prometheus rules.

    python -m dashboards.generate [--docs-url URL]

--docs-url: where you publish docs/ (`make docs`), for the alerts' runbook_url. Panels are in
`dashboards/*.py`, a file per board. Requires Grafana's SDK (extra `test`).
"""

import argparse
import json
from pathlib import Path

import yaml

from dashboards.bulk import BULK
from dashboards.capacity import CAPACITY
from dashboards.grafana import board_json
from dashboards.latency import LATENCY
from dashboards.pipeline import PIPELINE
from dashboards.rules import alerts_file, prometheus_rule, recording_file

FOLDER = Path(__file__).parent
KUBERNETES = FOLDER.parent / "deploy/kubernetes/monitoring"
HEAD = "# Generated from dashboards/rules.py by `python -m dashboards.generate`.\n"
BOARDS = (CAPACITY, LATENCY, PIPELINE, BULK)


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
