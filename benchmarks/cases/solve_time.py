"""Time of one full decision of the planner, both orders and baselines included.

    taskset -c 1 python -m benchmarks solve_time

Each sample is one `solve` of another random problem of 64 samples, 64 token groups and 60 layers,
both orders, both baselines and the lower bound included. Before timing, the solver's promise is
checked against the replay. Wall time holds what other processes took of the core meanwhile; the
thread's own CPU time beside it does not.
"""

import argparse
import os
import time
from typing import Any

import numpy as np

from benchmarks.harness import Measured, Table, documented_case
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.schedule.schedule import replay, schedule_of
from planner.schedule.solver import solve

_CHECKED = 5  # replays of 60 layers take some 0.1 s each
_WARM_UP = 100


def random_spec(rng: np.random.Generator, options: argparse.Namespace) -> PlanSpec:
    """Stages much shorter and much longer than each other, with or without launch times."""
    tokens = float(rng.choice([8.0, 96.0, 1024.0]))
    per_x = {"attention": 1.0, "shared": 1.0, "expert": tokens, "a2e": tokens, "e2a": tokens}
    lines = {
        name: Linear(
            float(rng.choice([0.0, 0.1, 1.0]) * rng.random()), float(10 ** rng.uniform(-2, 0.5)) / x
        )
        for name, x in per_x.items()
    }
    return PlanSpec(
        stages=StageModels(**lines),
        tokens_per_expert_per_sample=tokens,
        num_layers=options.layers,
        max_samples=options.samples,
        max_r2=options.token_groups,
        has_shared=True,
    )


def check(specs: list[PlanSpec]) -> None:
    for spec in specs:
        best = solve(spec).best
        replayed_ms = replay(schedule_of(spec, best.plan)).makespan_ms
        if abs(best.makespan_ms - replayed_ms) > 1e-6 * replayed_ms:
            raise SystemExit(f"solver says {best.makespan_ms} ms, replay {replayed_ms} ms: {spec}")


def solve_times(specs: list[PlanSpec]) -> dict[str, list[float]]:
    """Milliseconds of each solve, on the clock ("wall_ms") and of this thread ("cpu_ms")."""
    for spec in specs[:_WARM_UP]:
        solve(spec)
    samples: dict[str, list[float]] = {"wall_ms": [], "cpu_ms": []}
    for spec in specs:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        solve(spec)
        end_cpu_s, end_s = time.thread_time(), time.perf_counter()
        samples["wall_ms"].append(round((end_s - start_s) * 1e3, 4))
        samples["cpu_ms"].append(round((end_cpu_s - start_cpu_s) * 1e3, 4))
    return samples


def measure(options: argparse.Namespace) -> Measured:
    rng = np.random.default_rng(options.seed)
    specs = [random_spec(rng, options) for _ in range(options.count)]
    check(specs[:_CHECKED])
    samples = solve_times(specs)
    summary = {
        clock: {f"p{p}": round(float(np.percentile(row, p)), 4) for p in (50, 90, 99, 100)}
        for clock, row in samples.items()
    }
    settings = {"cores_allowed": sorted(os.sched_getaffinity(0)), "nice": os.nice(0)}
    return Measured(samples, summary, settings)


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = [[clock, *(f"{value:.3f}" for value in row.values())] for clock, row in summary.items()]
    return [Table("", ["clock", "p50", "p90", "p99", "maximum"], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=2000, help="problems")
    parser.add_argument("--samples", type=int, default=64, help="max_samples")
    parser.add_argument("--token-groups", type=int, default=64, help="max_r2")
    parser.add_argument("--layers", type=int, default=60, help="num_layers")
    parser.add_argument("--seed", type=int, default=0)


CASE = documented_case(__doc__, "Time of a planner decision", measure, tables, add_options)
