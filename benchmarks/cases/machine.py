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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
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


def _torch_mm(dtype: torch.dtype) -> Task:
    left, right = (torch.rand(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out), 2.0 * GEMM_SIZE**3


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
    "float32 GEMM, torch.mm": lambda: _torch_mm(torch.float32),
    "bfloat16 GEMM": lambda: _product(torch.bfloat16),
    "bfloat16 GEMM, torch.mm": lambda: _torch_mm(torch.bfloat16),
    "memory read": _read,
    "memory copy": _copy,
}
UNITS = {kind: "GFLOP/s" if "GEMM" in kind else "GB/s" for kind in KINDS}


class Cores:
    """One process on each core; a context manager."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Cores:
        context = multiprocessing.get_context("spawn")
        for core in self._cores:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(core, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(ANSWER_TIMEOUT_S)

    def rates(self, kind: str, cores: list[int]) -> list[float]:
        """Rate of `kind` on each of `cores` (indices), which run at the same time: in units/s."""
        for index in cores:
            self._ends[index].send(kind)
        answers = []
        for index in cores:
            if not self._ends[index].poll(ANSWER_TIMEOUT_S):
                raise TimeoutError(f"core {index}: no answer within {ANSWER_TIMEOUT_S:g} s")
            answers.append(self._ends[index].recv())
        return answers


def _serve(core: int, calls: Connection) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    tasks = {kind: make() for kind, make in KINDS.items()}
    while True:
        try:
            task, work = tasks[calls.recv()]
        except EOFError:
            return
        calls.send(_rate(task, work))


def _rate(task: Callable[[], object], work: float) -> float:
    runs, started_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - started_s) < SAMPLE_S:
        task()
        runs += 1
    return runs * work / spent_s


def rates_by_kind(
    rounds: int, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, dict[str, list[float]]]:
    """Samples in units/s by kind: "one core" (the cores in turn) and "all at once" (their sum)."""
    cores = sorted(os.sched_getaffinity(0))
    samples: dict[str, dict[str, list[float]]] = {
        kind: {"one core": [], "all at once": []} for kind in kinds
    }
    with Cores(cores) as processes:
        everyone = list(range(len(cores)))
        for number in range(rounds + 1):  # the first round warms up
            for kind, by_use in samples.items():
                alone = processes.rates(kind, [number % len(cores)])
                together = processes.rates(kind, everyone)
                if number:
                    by_use["one core"].append(sum(alone))
                    by_use["all at once"].append(sum(together))
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
