"""Experts gathered behind compute, over a link of limited rate: two prefill workers in two network
namespaces of this machine, a core each.

    python -m benchmarks gather_overlap

Needs root and iproute2. Parts: "overlap" (above the threshold, against resident workers and DP+EP:
rates, and processor time, which other work on the machine disturbs less), "threshold" (which batch
hides its transfers, against Eq. 1 and the workers' calibration). The transfer threads of a worker
share its core: the model has few experts for its compute, so that the link and not the copying is
the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Case, Measured
from benchmarks.support.gather_report import summarise, tables
from benchmarks.support.prefill_pair import Pair, Round
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.support.two_nodes import ENVIRONMENT, TwoNodes, two_namespaces
from models.spec.model import read_spec

MODEL: dict[str, Any] = {**MEDIUM, "num_experts": 16, "torch_dtype": "float32"}
ROW_TOKENS = 512
COMPARED = ("resident", "gathered")
SWEEP = (1, 3, 4, 5, 6)  # rows of a batch
CALIBRATED_ROWS = 3
PARTS = ("overlap", "threshold")
MODES = {"resident": 1, "gathered": 1, "hybrid": 2, "streamed": 2, "all_to_all": 4}
"""Kinds of workers, and in which rounds they run: in every one, every second, every fourth."""


async def _measure(options: argparse.Namespace) -> Measured:
    first, second, *cards = options.inside
    nodes = TwoNodes((first, second), (cards[0], cards[1]))
    nodes.limit_rate(options.megabits)
    model = {**MODEL, "num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", model)
        samples = await _gather_parts(nodes, path, options)
        summary = summarise(samples, read_spec(path), options.rows * ROW_TOKENS)
    return Measured(samples, summary, {"model": model})


async def _gather_parts(
    nodes: TwoNodes, path: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Start workers of all modes, then run the modes in turn."""
    modes = [mode for mode in MODES if mode in (*options.modes, *COMPARED)]
    pairs: dict[str, Pair] = {}
    samples: dict[str, dict[str, Any]] = {}
    try:
        for mode in modes if "overlap" in options.parts else COMPARED:
            pairs[mode] = await Pair.start(
                nodes,
                path,
                options.rows * ROW_TOKENS,
                experts=mode,
                host_store=path.parent,
            )
            print(f"started: {mode}", flush=True)
        await _check(pairs)
        if "overlap" in options.parts:
            samples["overlap"] = await _rounds(pairs, options.rows, options.rounds)
        if "threshold" in options.parts:
            samples["calibrated"] = {"saturation_flops": await _calibrated(nodes, path)}
            samples["threshold"] = await _sweeps(
                {mode: pairs[mode] for mode in COMPARED}, options.sweeps
            )
    finally:
        for pair in pairs.values():
            await pair.close()
    return samples


async def _calibrated(nodes: TwoNodes, path: Path) -> list[int]:
    """The threshold of each of two workers whose largest batch is below it: from a larger one they
    could not tell more than that it hides the transfers."""
    pair = await Pair.start(nodes, path, CALIBRATED_ROWS * ROW_TOKENS, experts="gathered")
    saturation = [int(pair.status(worker).sections["work"]["saturation"]) for worker in (0, 1)]
    await pair.close()
    return saturation


async def _check(pairs: dict[str, Pair]) -> None:
    """Outputs before times: equal in every kind of worker."""
    rows = _rows(2, seed=99)
    found = {mode: await pair.logits(1, rows) for mode, pair in pairs.items()}
    for mode, logits in found.items():
        if mode == "all_to_all":
            torch.testing.assert_close(logits, found["resident"], atol=1e-4, rtol=0)
        else:
            assert torch.equal(logits, found["resident"]), mode


async def _rounds(pairs: dict[str, Pair], rows: int, rounds: int) -> dict[str, list[Round]]:
    """Per kind, its rounds of one batch. Kinds follow each other forwards and backwards, so that a
    machine that grows slower or faster favours none. Round 0 warms up."""
    samples: dict[str, list[Round]] = {mode: [] for mode in pairs}
    for number in range(rounds + 1):
        due = [mode for mode in pairs if number % MODES[mode] == 0]
        for mode in due if number % 2 else reversed(due):
            found = await pairs[mode].run(number, _rows(rows, seed=number), 1)
            if number:
                samples[mode].append(found)
        print(f"round {number} of {rounds}", flush=True)
    return samples


async def _sweeps(pairs: dict[str, Pair], sweeps: int) -> dict[str, dict[str, list[Round]]]:
    """By number of rows and kind: every sweep runs every batch on every kind. Sweep 0 warms up."""
    samples: dict[str, dict[str, list[Round]]] = {
        str(rows): {mode: [] for mode in pairs} for rows in SWEEP
    }
    for number in range(sweeps + 1):
        for rows in SWEEP if number % 2 else reversed(SWEEP):
            for mode, pair in pairs.items():
                found = await pair.run(number, _rows(rows, seed=number), 1)
                if number:
                    samples[str(rows)][mode].append(found)
        print(f"sweep {number} of {sweeps}", flush=True)
    return samples


def _rows(count: int, *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    size = (count, ROW_TOKENS)
    rows: list[list[int]] = torch.randint(
        1, MODEL["vocab_size"], size, generator=generator
    ).tolist()
    return rows


def measure(options: argparse.Namespace) -> Measured:
    if options.inside is None:
        with two_namespaces() as nodes:
            inside = ["--inside", *nodes.names, *nodes.cards]
            command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], *inside]
            done = subprocess.run([*nodes.inside(0), *command], env=ENVIRONMENT, check=False)
        raise SystemExit(done.returncode)
    return asyncio.run(_measure(options))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabits", type=float, default=400, help="rate of the link, per second")
    parser.add_argument("--rows", type=int, default=12, help="of 512 tokens, in a full batch")
    parser.add_argument("--rounds", type=int, default=24, help="of the overlap part")
    parser.add_argument("--sweeps", type=int, default=10, help="of the threshold part")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)


CASES = [
    Case(
        "gather_overlap",
        "Experts gathered over a limited link",
        "How much of gathering experts is hidden behind compute, and from which batch on "
        "(MoE-Prefill, Eq. 1).",
        measure,
        tables,
        add_options,
    )
]
