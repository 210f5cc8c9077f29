"""Modes of experts on two workers over random mixes of prompts, and the chosen one.

    python -m benchmarks mode_choice

A random checkpoint of 120 M parameters in float32; a group of two workers with a core each for each
mode. A mix: a prompt of random length for one worker, or for each. The mode is chosen from earlier
mixes, by `BatchChoice` between one and all workers, else by least squares; then all are measured.
"""

import argparse
import contextlib
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from actors.planning.planner_inputs import shape_of
from benchmarks.cases.shared_load import WORKERS, Arrival, Workers, running
from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from cluster.tools.bench.workload import mean
from models.spec.model import read_spec
from planner.routing.open_requests import RequestWork, work_of
from planner.schedule.batch_choice import BatchChoice, BatchWork

ALWAYS = """import sys
from planner.schedule.batch_choice import BatchChoice
BatchChoice.gain_s = lambda *_: 60.0
exec(sys.argv[-1])"""  # runs a rank that shares each batch if the other worker is idle
GROUPS: dict[str, Sequence[str]] = {
    "gathered": (),
    "all_to_all": (),
    "resident": (),
    "shuffled": (sys.executable, "-c", ALWAYS),
}
SERVED = "one or all workers"  # the choice of a worker with a batch while the other is idle
CHOICES = {
    SERVED: ("gathered", "shuffled"),
    "divided experts": ("gathered", "all_to_all", "shuffled"),
    "any": tuple(GROUPS),
}
SLACKS = (0.0, 0.03, 0.05)


def measured_mixes(
    groups: dict[str, Workers], flops_of: RequestWork, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return mixes with their measured mean times by mode, and the modes chosen before."""
    dice, served, found = random.Random(1), BatchChoice(WORKERS), list[dict[str, Any]]()
    for number in range(options.mixes):
        tokens = [round(16 * 128 ** dice.random()) for _ in range(1 + number % WORKERS)]
        arrivals = [Arrival(0.0, each, worker) for worker, each in enumerate(tokens)]
        size, flops = sum(tokens), sum(flops_of(0, each) for each in tokens)
        guess = expected_seconds(found, tokens)
        chosen = {n: min(modes, key=guess.__getitem__) for n, modes in CHOICES.items() if guess}
        batch = BatchWork(size, flops, MEDIUM["num_hidden_layers"], 4 * MEDIUM["hidden_size"])
        if len(tokens) == 1 and chosen:
            chosen[SERVED] = "shuffled" if served.gain_s(batch, 0.0, 1.0) > 0.0 else "gathered"
        seconds = measured_seconds(groups, arrivals, options.seconds)
        if len(tokens) == 1:
            served.alone(batch, seconds["gathered"])
            served.shared(batch, seconds["shuffled"])
        found.append({"tokens": tokens, "seconds": seconds, "chosen": chosen})
    return found


def expected_seconds(found: Sequence[dict[str, Any]], tokens: list[int]) -> dict[str, float]:
    """Return the seconds of a mix by mode, from mixes of as many prompts; empty before some."""
    earlier = [each for each in found if len(each["tokens"]) == len(tokens)]
    features = [sizes_of(each["tokens"]) for each in earlier]
    if len(earlier) <= 2 * len(sizes_of(tokens)):
        return {}
    expected = {}
    for mode in GROUPS:
        seconds = np.array([each["seconds"][mode] for each in earlier])
        relative = np.array(features) / seconds[:, None]  # errors count relative to the time
        weights = np.linalg.lstsq(relative, np.ones(len(seconds)))[0]
        expected[mode] = float(np.dot(sizes_of(tokens), weights))
    return expected


def sizes_of(tokens: list[int]) -> list[float]:
    return [1.0, sum(tokens), max(tokens), sum(each**2 / 1000 for each in tokens)]


def measured_seconds(
    groups: dict[str, Workers], arrivals: Sequence[Arrival], least_s: float
) -> dict[str, float]:
    """Return the median of a mix in each mode, of runs in turns for some time."""
    runs: dict[str, list[float]] = {mode: [] for mode in groups}
    while min(len(each) for each in runs.values()) < 2 or sum(runs["gathered"]) < least_s:
        for mode, group in groups.items():
            runs[mode].append(mean(group.play(arrivals)))
    return {mode: statistics.median(each) for mode, each in runs.items()}


def agreement(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return how often each mode is the best, and the chosen one is, or is slower by a part."""
    best, slower = Counter[str](), list[float]()
    for each in found:
        if name in each["chosen"]:
            fastest = min(CHOICES[name], key=each["seconds"].__getitem__)
            best[fastest] += 1
            slower.append(each["seconds"][each["chosen"][name]] / each["seconds"][fastest] - 1)
    right = {f"within {slack:.0%}": mean([s <= slack for s in slower]) for slack in SLACKS}
    return {"mixes": len(slower), **right, **best}


def measure(options: argparse.Namespace) -> Measured:
    with TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = write_random_checkpoint(Path(scratch), {**MEDIUM, "torch_dtype": "float32"})
        flops_of = work_of(shape_of(read_spec(folder), 4))
        groups = {n: stack.enter_context(running(folder, n, how)) for n, how in GROUPS.items()}
        found = measured_mixes(groups, flops_of, options)
    summary = {}
    for name, busy in ((SERVED, 1), *((n, b) for n in list(CHOICES)[1:] for b in (1, 2))):
        some = [each for each in found if len(each["tokens"]) == busy]
        summary[f"{name}, {busy} busy"] = agreement(some, name)
    return Measured({"mixes": found}, summary)


def tables(summary: dict[str, Any]) -> list[Table]:
    title = "Choices at most 3 % slower than the best mode"
    return [table_of(summary, title, "choice", ("mixes", "within 3%"))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixes", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=0.6, help="least time of a mix in a mode")


CASE = documented_case(__doc__, "Choice of a mode", measure, tables, add_options)
