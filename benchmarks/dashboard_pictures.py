"""Pictures of all dashboards with live data, for the documents: a server of our own under load, a
real Prometheus, the dashboards' own queries; drawn by matplotlib, not by Grafana.

    python -m benchmarks.dashboard_pictures [--seconds 90] [--output docs/images]

Says which panels have no data (the server moves no experts and has all of them in memory).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.prometheus import Points, Prometheus, config_of
from benchmarks.support.server import ServerProcess
from cluster.tools.plots import pyplot
from dashboards.panels import Board

ROOT = Path(__file__).parent.parent
STEP_S = 1.0
LAST_S = 8.0  # of the load, in which the last ones only end
COLORS = {"green": "#56a64b", "yellow": "#e0b400", "red": "#e02f44"}
RANKS = ("--attention-ranks", "1", "--expert-ranks", "1", "--prefill-ranks", "1")
UNITS = {"percentunit": "%", "reqps": "req/s", "Bps": "B/s", "ops": "/s", "short": "", "x": "x"}
TEXTS = ("a film that one forgets", "the best that I have seen", "too long, and well played")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*RANKS, checkout=ROOT) as server:
        server.wait_healthy()
        target = server.url.removeprefix("http://")
        with Prometheus(Path(folder), config_of(Path(folder), [target])) as prometheus:
            _load(server.url, options.rate, options.seconds)
            end_s = time.time() - LAST_S
            for board in Board:
                _draw(board, prometheus, (end_s, options.seconds), options.output)


def _load(url: str, rate: float, seconds: float) -> None:
    """Chats of both classes, and rows to classify."""
    ending = threading.Event()
    rows = threading.Thread(target=_classify, args=(url, ending))
    rows.start()
    subprocess.run(
        f"{sys.executable} -m cluster bench --url {url} --json --rate {rate} --seconds {seconds} "
        "--ls 0.5 --prompt-tokens 64 --output-tokens 24".split(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ending.set()
    rows.join()


def _classify(url: str, ending: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=30.0) as client:
        while not ending.is_set():
            body = {
                "model": "bundled",
                "input": [f"{text}, seen at {time.time():.1f}" for text in TEXTS],
                "labels": ["good", "bad"],
            }
            client.post("/v1/classify", json=body)
            time.sleep(0.3)


def _draw(board: Board, prometheus: Prometheus, of_time: tuple[float, float], output: Path) -> None:
    end_s, seconds = of_time
    stored = json.loads((ROOT / "dashboards" / f"{board}.json").read_text(encoding="utf-8"))
    panels = [panel for panel in stored["panels"] if panel["type"] != "row"]  # shown at first
    columns, count = 4 if len(panels) > 16 else 3, len(panels)
    figure, axes = pyplot("--output").subplots(
        math.ceil(count / columns),
        columns,
        figsize=(5 * columns, 2.5 * math.ceil(count / columns)),
        squeeze=False,
    )
    empty = []
    for panel, axis in zip(panels, axes.flat, strict=False):
        found = [
            (target["legendFormat"], points)
            for target in panel["targets"]
            for points in prometheus.lines(
                target["expr"], end_s=end_s, seconds=seconds, step_s=STEP_S
            )
        ]
        if not found:
            empty.append(panel["title"])
        _draw_panel(axis, panel, found)
    for axis in axes.flat[count:]:
        axis.axis("off")
    figure.suptitle(stored["title"], fontsize=15)
    figure.tight_layout()
    figure.savefig(output / f"dashboard_{board}.png", dpi=60)
    print(f"{board}: {count} panels; without data: {', '.join(empty) or 'none'}")


def _draw_panel(axis: Any, panel: dict[str, Any], found: list[tuple[str, Points]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axis.set_title(panel["title"], fontsize=10, loc="left")
    axis.tick_params(labelsize=7)
    unit = defaults["unit"]
    axis.set_ylabel(UNITS.get(unit, unit), fontsize=7)
    if panel["type"] == "stat":
        _draw_stat(axis, unit, found)
        return
    times = [at for _, points in found for at, _ in points.values]
    for legend, points in found:
        scale = 100.0 if unit == "percentunit" else 1.0
        values = [(at - min(times), scale * value) for at, value in points.values]
        finite = [(at, value) for at, value in values if math.isfinite(value)]
        if finite:
            label = _legend(legend, points)
            axis.plot(*zip(*finite, strict=True), linewidth=1, label=label)
    if found:
        axis.legend(fontsize=6, loc="upper left", ncols=2)
    axis.set_ylim(bottom=0)
    top = axis.get_ylim()[1]
    for step in defaults["thresholds"]["steps"][1:]:
        level = step["value"] * (100.0 if unit == "percentunit" else 1.0)
        if level < 3 * top:
            axis.axhline(level, color=COLORS[step["color"]], linestyle="--", linewidth=0.8)


def _draw_stat(axis: Any, unit: str, found: list[tuple[str, Points]]) -> None:
    axis.axis("off")
    latest = max((points.values[-1][0] for _, points in found), default=0.0)
    now = [(legend, p) for legend, p in found if p.values[-1][0] == latest]
    for index, (legend, points) in enumerate(now):
        value = points.values[-1][1]
        shown = f"{value:.0%}" if unit == "percentunit" else f"{value:.3g} {UNITS.get(unit, unit)}"
        text = f"{shown}  {_legend(legend, points)}"
        size = 17 if len(now) < 3 else 12
        axis.text(0.02, 0.75 - 0.7 * index / max(1, len(now)), text, fontsize=size)


def _legend(legend: str, points: Points) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: points.labels.get(found[1], ""), legend)


if __name__ == "__main__":
    main()
