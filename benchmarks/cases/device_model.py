"""The GPU channels and gathers on a model of the CUDA runtime (simulated; no GPU is used).

A run is one random interleaving of the real code of `nccl`, `ipc` and the gather: processes,
messages, kernels and transfers at random times. A million take one to two hours on two cores.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from actors.channels import ipc, nccl
from benchmarks.harness import Measured, Table, documented_case, table_of
from contracts.errors import TandemError
from tests.support.channel_workload import PIPELINES, Workload, World, overlap
from tests.support.cuda_model import ModelError, installed
from tests.support.gather_workload import HIDDEN, GatherWork, GatherWorld, gather_code, hidden_share
from tests.support.planted_device_bugs import device_bugs, found, planted

BACKENDS = {"nccl": nccl, "ipc": ipc}
BROAD_WAIT = "a receive waits for all compute"  # what the code did before
SEEDS = range(10)  # of a planted bug
KINDS = (*BACKENDS, *BACKENDS, "gather")  # of random workloads: a gather takes as long as three
RANKS = (*10 * [(1, 1)], *3 * [(1, 2)], *2 * [(2, 1)], (2, 2))  # attention, expert
CHUNK = 500


def measure(options: argparse.Namespace) -> Measured:
    logging.disable(logging.WARNING)  # lost peers
    with installed():
        symptoms = {bug.name: found(bug, SEEDS) for bug in device_bugs()}
        shares = {
            f"{name}: {pipeline}": overlap(backend, work)
            for pipeline, work in PIPELINES.items()
            for name, backend in (*BACKENDS.items(), (BROAD_WAIT, _before()))
        }
        hidden = {kind: hidden_share(gather_code(), work) for kind, work in HIDDEN.items()}
    failures, runs, wall_s = _interleavings(options.runs, options.first_seed)
    kinds = Counter(bug.kind for bug in device_bugs())
    hits = Counter(bug.kind for bug in device_bugs() if symptoms[bug.name])
    return Measured(
        samples={"symptoms": symptoms, "failures": failures},
        summary={
            "bugs": {kind: {"planted": kinds[kind], "found": hits[kind]} for kind in kinds}
            | {"all": {"planted": kinds.total(), "found": hits.total()}},
            "interleavings": {
                "of the right code": {
                    "runs": runs, "failures": len(failures), "runs_per_s": runs / wall_s,
                }
            },
            "overlap": {
                name: {
                    "model": each.model, "plan": each.plan,
                    "share_of_the_plan": each.model / each.plan,
                }
                for name, each in shares.items()
            },
            "hidden": {kind: {"share": share} for kind, share in hidden.items()},
        },
    )  # fmt: skip


def _before() -> Any:
    (bug,) = [bug for bug in device_bugs() if bug.name == BROAD_WAIT]
    return planted(bug, nccl)


def random_workload(seed: int) -> Workload:
    dice = random.Random(seed)
    attention_ranks, expert_ranks = dice.choice(RANKS)
    return Workload(
        layers=dice.choice((1, 1, 1, 2)),
        micro_batches=dice.choice((1, 2)),
        attention_ranks=attention_ranks,
        expert_ranks=expert_ranks,
        attention_us=dice.choice((5.0, 300.0)),
        expert_us=dice.choice((5.0, 300.0)),
        payload_bytes=dice.choice((64, 4000, 30_000)),
        sync=dice.choice((0.0, 0.3)),
        two_classes=dice.random() < 0.5,
        empty=dice.choice((0.0, 0.3)),
        segment_bytes=dice.choice((4096, 64 << 10)),
    )


def random_gather(seed: int) -> GatherWork:
    dice = random.Random(seed)
    return GatherWork(
        workers=dice.choice((2, 2, 2, 2, 2, 2, 2, 3)),
        layers=dice.choice((2, 2, 3)),
        passes=dice.choice((1, 1, 1, 2)),
        window=dice.choice((None, 1, 2)),
        compute_us=dice.choice((5.0, 300.0, 6000.0)),
        width=4,
        sync=dice.choice((0.0, 0.3)),
        dies=dice.random() < 0.25,
        nodes=dice.choice((1, 1, 2)),
    )


def _interleavings(runs: int, first: int) -> tuple[list[str], int, float]:
    cores = len(os.sched_getaffinity(0))
    starts = range(first, first + runs, CHUNK)
    begin_s = time.perf_counter()
    failures: list[str] = []
    with ProcessPoolExecutor(cores, get_context("spawn"), _prepare) as pool:
        for some in pool.map(_run_chunk, starts, [min(CHUNK, first + runs - s) for s in starts]):
            failures += some
    return failures, runs, time.perf_counter() - begin_s


def _prepare() -> None:
    logging.disable(logging.WARNING)
    gc.freeze()  # modules, which no collection need look at


def _run_chunk(first: int, runs: int) -> list[str]:
    failures, gathers = [], gather_code()
    with installed():
        for seed in range(first, first + runs):
            name, is_lazy = KINDS[seed % len(KINDS)], seed % 4 == 0
            try:
                if name == "gather":
                    GatherWorld(random_gather(seed), gathers).run(seed, lazy_loading=is_lazy)
                else:
                    work = random_workload(seed)
                    World(work, BACKENDS[name]).run(seed, lazy_loading=is_lazy)
            except (ModelError, TandemError) as failure:
                failures.append(f"{name}, seed {seed}: {failure}")
    return failures


def tables(summary: dict[str, Any]) -> Sequence[Table]:
    return [
        table_of(summary["bugs"], "Planted bugs (simulated)", "kind"),
        table_of(summary["interleavings"], "Random interleavings (simulated)", "code"),
        table_of(
            summary["overlap"],
            "Overlap of A2E and E2A with compute (simulated)",
            "code: stages of a layer",
            ("share_of_the_plan",),
        ),
        table_of(
            summary["hidden"],
            "Copies of experts between GPUs that compute hides, once it runs (simulated)",
            "experts",
        ),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=10_000, help="random interleavings")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first run")


CASE = documented_case(
    __doc__, "GPU channels on a model of CUDA", measure, tables, add_options, kind="simulated"
)
