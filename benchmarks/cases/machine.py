"""GEMM rate and memory bandwidth of one core, and of all cores at once.

Other benchmarks state their figures as fractions of these, one process per core.

    python -m benchmarks machine
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.model_work import Rates
from kernels.linear import PackedLinear

GEMM_SIZE = 512  # three float32 matrices of 1 MiB: no larger ones are faster, and calls cost little
BUFFER_BYTES = 256 << 20  # beyond any cache
SAMPLE_S = 0.25
ANSWER_TIMEOUT_S = 60.0
LIMIT_ROUNDS = 6


Task = tuple[Callable[[], object], float]  # and the amount of work in one run of it


def _product(dtype: torch.dtype) -> Task:
    """As the ranks take it; work in FLOPs."""
    x, weight = (torch.rand(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    linear = PackedLinear(weight)
    return lambda: linear(x), 2.0 * GEMM_SIZE**3


def _read() -> Task:
    source = torch.rand(BUFFER_BYTES // 4)
    return source.sum, float(BUFFER_BYTES)


def _copy() -> Task:
    """Counts the bytes copied once, as memcpy does, though each is read and written."""
    source, target = (torch.rand(BUFFER_BYTES // 4) for _ in range(2))
    return lambda: target.copy_(source), float(BUFFER_BYTES)


# Each makes what one process measures.
KINDS: dict[str, Callable[[], Task]] = {
    "float32 GEMM": lambda: _product(torch.float32),
    "bfloat16 GEMM": lambda: _product(torch.bfloat16),
    "memory read": _read,
    "memory copy": _copy,
}
UNITS = {kind: "GFLOP/s" if "GEMM" in kind else "GB/s" for kind in KINDS}


_tasks: dict[str, Task] = {}  # of a process on one core


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    _tasks.update({kind: make() for kind, make in KINDS.items()})


def _rate(kind: str) -> float:
    task, work = _tasks[kind]
    runs, started_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - started_s) < SAMPLE_S:
        task()
        runs += 1
    return runs * work / spent_s


def _rates(processes: Sequence[Executor], kind: str) -> float:
    """Return the sum of the rates of processes that run at the same time, in units/s."""
    running = [process.submit(_rate, kind) for process in processes]
    return sum(each.result(ANSWER_TIMEOUT_S) for each in running)


def rates_by_kind(
    rounds: int, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, dict[str, list[float]]]:
    """Samples in units/s by kind: "one core" (the cores in turn) and "all at once" (their sum)."""
    cores = sorted(os.sched_getaffinity(0))
    samples: dict[str, dict[str, list[float]]] = {
        kind: {"one core": [], "all at once": []} for kind in kinds
    }
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [ProcessPoolExecutor(1, context, _pin, (core,)) for core in cores]
        processes = [stack.enter_context(pool) for pool in pools]
        for number in range(rounds + 1):  # the first round warms up
            for kind, by_use in samples.items():
                alone = _rates([processes[number % len(cores)]], kind)
                together = _rates(processes, kind)
                if number:
                    by_use["one core"].append(alone)
                    by_use["all at once"].append(together)
    return samples


def core_rates(dtype: torch.dtype) -> Rates:
    """The best of one core alone: whatever else runs only lowers a rate."""
    product = f"{str(dtype)[6:]} GEMM"
    samples = rates_by_kind(LIMIT_ROUNDS, [product, "memory read"])
    best = {kind: max(by_use["one core"]) for kind, by_use in samples.items()}
    return Rates(best[product], best["memory read"])


def _figures(values: list[float]) -> dict[str, float]:
    """In units/s. best: the machine's limit, since whatever else runs only lowers a rate."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"best": max(values), "median": statistics.median(values), "p10": tenths[0]}


def measure(options: argparse.Namespace) -> Measured:
    samples = rates_by_kind(options.rounds)
    summary = {
        kind: {use: _figures(values) for use, values in by_use.items()}
        for kind, by_use in samples.items()
    }
    return Measured(samples, summary, {"gemm_size": GEMM_SIZE, "buffer_bytes": BUFFER_BYTES})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for kind, by_use in summary.items():
        scaled = [[f"{value / 1e9:.1f}" for value in row.values()] for row in by_use.values()]
        rows.append([kind, *(f"{top} ({', '.join(rest)})" for top, *rest in scaled), UNITS[kind]])
    return [Table("best (median, p10)", ["", "one core", "all at once", "unit"], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


CASE = documented_case(__doc__, "The machine", measure, tables, add_options)
