"""Every panel on a real Prometheus with two clusters, two ranks a group, a lost rank, an idle hour.

The series are synthetic: each declared metric with each of its labels, all shares at 80 %.
"""

import itertools
import json
import math
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from contracts import metrics
from contracts.metrics import Metric, MetricKind
from dashboards.panels import Board
from tests.architecture.support import ROOT
from tests.support.prometheus import Points, Prometheus, is_installed

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="prometheus is not installed: apt-get install prometheus"
)

STEP_S, BUSY_S, IDLE_S = 15, 1200, 3600
RANKS = [(group, f"{group}-{n}") for group in ("attention", "expert", "prefill") for n in (0, 1)]
LOST, LOST_AFTER_S = ("b", "expert-1"), 600
VALUES = {
    "pipeline": ("generation", "prefill"),
    "class": ("ls", "be"),
    "outcome": ("ok", "error", "overload"),
    "stage": ("attention", "gather", "host_copy"),
    "state": ("free", "used", "cached"),
    "kind": ("attention", "expert"),
    "objective": ("be_wait",),
}
GAUGES = {  # others: 1
    metrics.CAPACITY_GAIN: -0.1,
    metrics.PLAN_PREDICTED: 1.1,
    metrics.LOAD: 0.8,
}
RATES = {  # others: 1 per second
    metrics.CACHED_TOKENS: 0.8,
    metrics.BE_HELD: 0.8,
    metrics.EXPOSED_COMMUNICATION: 0.8,
    metrics.EXPERT_WAIT: 0.8,
    metrics.EXPERT_MOVE_TIME: 0.8,
}
IDLE_TO_0 = {metrics.RANK_BUSY, metrics.CAPACITY_USED, metrics.MODEL_FLOPS_UTILIZATION}


def _labels(metric: Metric, cluster: str) -> Iterator[dict[str, str]]:
    """Yield the labels of each series, with those of its target."""
    own = [label for label in metric.labels if label not in ("group", "rank")]
    processes = RANKS if "rank" in metric.labels else [("ingress", "ingress-a")]
    for values in itertools.product(*(VALUES.get(label, ("0",)) for label in own)):
        for group, rank in processes:
            target = {"cluster": cluster, "group": group, "rank": rank}
            yield dict(zip(own, values, strict=True)) | target


def _samples(metric: Metric, elapsed_s: int) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield suffix, further labels and value. A histogram observes 0.8 s per second, in one."""
    busy_s = min(elapsed_s, BUSY_S)
    if metric.kind is MetricKind.GAUGE:
        share = 0.8 if metric.name.endswith(("_fraction", "_utilization")) else 1.0
        is_idle = metric in IDLE_TO_0 and elapsed_s > BUSY_S
        yield "", {}, 0.0 if is_idle else GAUGES.get(metric, share)
    elif metric.kind is MetricKind.COUNTER:
        yield "_total", {}, RATES.get(metric, 1.0) * busy_s
    else:
        for bound in (*metric.buckets, math.inf):
            le = "+Inf" if bound == math.inf else repr(float(bound))
            yield "_bucket", {"le": le}, busy_s if bound >= 0.8 else 0
        yield "_sum", {}, 0.8 * busy_s
        yield "_count", {}, busy_s


def _open_metrics(start_s: int) -> Iterator[str]:
    for metric in metrics.ALL:
        stem = metric.name.removesuffix("_total")
        yield f"# TYPE {stem} {metric.kind}\n"
        for cluster in ("a", "b"):
            for labels in _labels(metric, cluster):
                is_lost = (cluster, labels["rank"]) == LOST
                end_s = LOST_AFTER_S if is_lost else BUSY_S + IDLE_S
                for elapsed_s in range(0, end_s + 1, STEP_S):
                    for suffix, more, value in _samples(metric, elapsed_s):
                        text = ",".join(f'{k}="{v}"' for k, v in {**labels, **more}.items())
                        yield f"{stem}{suffix}{{{text}}} {value:g} {start_s + elapsed_s}\n"
    yield "# EOF\n"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, int]]:
    """Yield Prometheus and the time at which the traffic ended."""
    folder = tmp_path_factory.mktemp("panels")
    start_s = int(time.time()) - BUSY_S - IDLE_S - 60
    with (folder / "series").open("w", encoding="utf-8") as file:
        file.writelines(_open_metrics(start_s))
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "series", "data"],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (folder / "prometheus.yml").write_text("scrape_configs: []\n", encoding="utf-8")
    with Prometheus(folder, folder / "prometheus.yml", window="1m") as prometheus:
        yield prometheus, start_s + BUSY_S


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    text = (ROOT / f"dashboards/{board}.json").read_text(encoding="utf-8")
    for panel in json.loads(text)["panels"]:
        yield from (one for one in (panel, *panel.get("panels", ())) if one.get("targets"))


def _faults(panel: dict[str, Any], lines: list[Points]) -> Iterator[str]:
    defaults = panel["fieldConfig"]["defaults"]
    for labels, points in lines:
        values = [value for _, value in points if not math.isnan(value)]
        if labels.get("cluster") not in ("a", "b"):
            yield f"a line of no cluster: {labels}"
        if defaults["unit"] == "percentunit" and max(values, default=0.0) > 0.801:
            yield f"{labels}: {max(values):g}, but each source has 0.8 at most"
        if min(values, default=0.0) < defaults.get("min", -math.inf):
            yield f"{labels}: {min(values):g} is below the panel"


@pytest.mark.parametrize("board", Board)
def test_panels_have_data_of_each_cluster_and_no_value_beyond_their_unit(
    stored: tuple[Prometheus, int], board: Board
) -> None:
    prometheus, ended_s = stored
    found: list[str] = []
    for panel in _panels(board):
        for expression in (target["expr"] for target in panel["targets"]):
            busy = prometheus.lines(expression, end_s=ended_s, seconds=300, step_s=60)
            idle = prometheus.lines(expression, end_s=ended_s + IDLE_S, seconds=IDLE_S, step_s=120)
            faults = [*_faults(panel, busy), *_faults(panel, idle)]
            if {labels.get("cluster") for labels, _ in busy} != {"a", "b"}:
                faults.append("no data of one cluster")
            found += [f"{panel['title']}: {fault}: {expression}" for fault in faults]
    assert not found, "\n".join(found)
