"""Makespans of the solver's plans on two Ray nodes joined by a link of limited rate.

Plans: naive, best PPPipe, FinDEP, beyond. The nodes are network namespaces of this machine with one
rank and one core each.

    python -m benchmarks planned_overlap --pictures docs/images --trace planned.trace.json

Needs root and iproute2. For each model and rate, batches of known tasks are measured first, and the
planner's cost models are fitted to them; then plans run in turn.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from actors.planning.planner_inputs import shape_of
from actors.telemetry.chrome_trace import write_chrome_trace
from benchmarks.harness import Measured, documented_case
from benchmarks.support.pinned_batches import BatchRunner, bench_client, pin_to_core
from benchmarks.support.planned_points import (
    Pictured,
    Point,
    PointRun,
    PointRunner,
    summary_of,
    tables,
)
from benchmarks.support.random_checkpoint import MEDIUM, MEDIUM_SHARED, write_random_checkpoint
from benchmarks.support.two_nodes import ADDRESS, ENVIRONMENT, TwoNodes, ray_nodes, two_namespaces
from cluster.fleet.fleet import Fleet
from cluster.fleet.launch import launch
from cluster.routing.rank_client import RankClient
from cluster.serving.ray_session import ray_session
from cluster.tools.plots import draw_gantt
from contracts.loading import load_config
from models.spec.model import read_spec
from models.weights.checkpoint import element_bytes

MODELS: dict[str, dict[str, Any]] = {
    "medium": MEDIUM,
    # Plans are about layers with experts: without a dense one in front.
    "medium-shared": {**MEDIUM_SHARED, "first_k_dense_replace": 0},
}
POINTS = (
    Point("medium", 250, 1024, 2),
    Point("medium", 500, 1024, 1),
    Point("medium", 1000, 512, 8),
    Point("medium", 1000, 4096, 1),
    Point("medium-shared", 250, 1024, 2),
    Point("medium-shared", 500, 1024, 1),
    Point("medium-shared", 1000, 512, 8),
    Point("medium-shared", 1000, 2048, 1),
)
PICTURED_POINT, PICTURED_PLAN, PICTURED_LAYERS = POINTS[3], "beyond", range(3, 5)
_CALL_TIMEOUT_S = 30.0
_LARGEST_BATCH_TOKENS = 8192
_SPANS = 6000  # several of the largest batches


class Setting(NamedTuple):
    """Nodes with Ray on them, and a folder for checkpoints."""

    nodes: TwoNodes
    folder: Path
    dtype: Literal["bfloat16", "float32"]


def _measure(options: argparse.Namespace) -> list[PointRun]:
    points = [POINTS[number] for number in options.points or range(len(POINTS))]
    first, second, *cards = options.inside
    nodes = TwoNodes((first, second), (cards[0], cards[1]))
    runs: list[PointRun] = []
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        setting = Setting(nodes, Path(folder), options.dtype)
        for model in dict.fromkeys(point.model for point in points):
            for run, pictured in run_points(
                setting, [point for point in points if point.model == model], options.rounds
            ):
                runs.append(run)
                if run.point == PICTURED_POINT:
                    _draw(pictured, options)
    return runs


def run_points(
    setting: Setting, points: Sequence[Point], rounds: int
) -> list[tuple[PointRun, Pictured]]:
    """Points of one model, on ranks of their own. To be called on the first node."""
    path = write_random_checkpoint(setting.folder / points[0].model, MODELS[points[0].model])
    with spread_fleet(path, setting.dtype) as fleet:
        return asyncio.run(_run_on(fleet, setting, path, points, rounds))


@contextmanager
def spread_fleet(path: Path, dtype: str) -> Iterator[Fleet]:
    """One rank on each of the two nodes; on a machine of two cores, each on its own core."""
    config = load_config(
        None,
        [
            f"model.dtype={dtype}",
            f"schedule.max_batch_tokens={_LARGEST_BATCH_TOKENS}",
            "kv.prefix_cache=false",
            f"kv.pool_tokens={2 * _LARGEST_BATCH_TOKENS}",
            "groups.placement=spread",
            f"groups.address={ADDRESS}",
            "channel.backend=tcp",
            f"trace.spans={_SPANS}",
        ],
    )
    with ray_session(config, ENVIRONMENT, show_rank_logs=False):
        fleet = launch(config, str(path))
        try:
            ranks = fleet.directory.ranks
            if os.cpu_count() == len(ranks):
                for core, ready in enumerate(ranks):
                    pin_to_core(ready.pid, core)
            yield fleet
        finally:
            fleet.close()


async def batch_runner(fleet: Fleet) -> tuple[RankClient, BatchRunner]:
    """What runs batches on the one attention rank, and the client to close afterwards."""
    directory = fleet.directory
    ((name, address),) = directory.client_addresses.items()
    client = await bench_client(name, address, directory.token)
    pin = partial(fleet.pin_plan, timeout_s=_CALL_TIMEOUT_S)
    return client, BatchRunner(client, pin, partial(fleet.spans, _CALL_TIMEOUT_S))


async def _run_on(
    fleet: Fleet, setting: Setting, path: Path, points: Sequence[Point], rounds: int
) -> list[tuple[PointRun, Pictured]]:
    client, batches = await batch_runner(fleet)
    spec = read_spec(path)
    runner = PointRunner(batches, shape_of(spec, element_bytes(spec, setting.dtype)))
    done = []
    for rate in dict.fromkeys(point.megabits_per_s for point in points):
        setting.nodes.limit_rate(rate)
        print(f"measuring stages: {points[0].model}, {rate} Mbit/s", flush=True)
        costs = await runner.calibrate()
        for point in points:
            if point.megabits_per_s == rate:
                done.append(await runner.run(point, costs, rounds, PICTURED_PLAN))
                print(f"done: {point.label}", flush=True)
    await client.close()
    return done


def _draw(pictured: Pictured, options: argparse.Namespace) -> None:
    plan, predicted, spans = pictured
    if options.trace is not None:
        write_chrome_trace(spans, options.trace)
    if options.pictures is None:
        return
    what = f"{plan.label}, layers {PICTURED_LAYERS[0]} and {PICTURED_LAYERS[-1]}"
    for kind, shown in (("predicted", predicted.spans), ("measured", spans)):
        path = options.pictures / f"planned_{kind}.svg"
        draw_gantt(shown, PICTURED_LAYERS, f"{kind.capitalize()}: {what}", path, "--pictures")


def measure(options: argparse.Namespace) -> Measured:
    if options.inside is None:
        with two_namespaces() as nodes, ray_nodes(nodes):
            inside = ["--inside", *nodes.names, *nodes.cards]
            command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], *inside]
            done = subprocess.run([*nodes.inside(0), *command], env=ENVIRONMENT, check=False)
        raise SystemExit(done.returncode)
    runs = {run.point.label: run for run in _measure(options)}
    summary = summary_of(list(runs.values()))
    return Measured(runs, summary, {"models": MODELS}, f"_{options.dtype}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--points", type=int, nargs="*", help="numbers of POINTS (default: all)")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of one plan")
    parser.add_argument("--trace", type=Path, help="write that plan's real execution here")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)


PICTURES = ("images/planned_predicted.svg", "images/planned_measured.svg")
CASE = documented_case(
    __doc__, "Plans, predicted and measured", measure, tables, add_options, pictures=PICTURES
)
