"""Decode and prefill tokens/s of two ranks and of a colocated one beside llama.cpp and
`transformers`, with all cores for each engine, interleaved in one run.

    pip install -e '.[bench,engines]' && python -m benchmarks engines --dtype bfloat16
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from actors.channels.handshake import Identity
from benchmarks.cases.beside_transformers import ATTENTION, EXPERTS, timed
from benchmarks.harness import Case, Measured, Table
from benchmarks.support.llama_cpp import LlamaCpp, write_gguf
from benchmarks.support.others import wait_for_idle
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.support.sides import DECODE_STEPS, Implementation, Ours, Theirs
from cluster.routing.rank_client import RankClient
from contracts.config import TandemConfig
from contracts.loading import load_config
from tests.support.local_group import LocalGroup

ENGINES = ("two ranks", "colocated", "llama.cpp", "transformers")
PHASES = {"decode, 16 streams": (16, 32), "decode, 1 stream": (1, 32), "prefill, 8 x 512": (8, 512)}
RANKS = {
    "two ranks": [],
    "colocated": ["groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=1"],
}
QUIET_CORES, IDLE_WAIT_S = 0.15, 2.0
AGREEMENT = {"float32": 0.9, "bfloat16": 0.4}  # of first tokens; weights are random


def _config(options: argparse.Namespace, engine: str) -> TandemConfig:
    threads = f"groups.torch_threads={os.cpu_count() or 1}"
    pool = "kv.pool_tokens=16384"
    dtype, cache = f"model.dtype={options.dtype}", "kv.prefix_cache=false"
    return load_config(None, [dtype, cache, pool, threads, *RANKS[engine]])


async def _client(group: LocalGroup) -> RankClient:
    ((name, address),) = group.client_addresses.items()
    client = RankClient(name, address, Identity(name="bench", token=group.token, epoch=None))
    client.start()
    await client.wait_until(lambda ready: ready.problem is None)
    return client


async def _measure(options: argparse.Namespace, folder: Path) -> Measured:
    dtype, cores = getattr(torch, options.dtype), os.cpu_count() or 1
    samples: dict[str, dict[str, list[float]]] = {phase: defaultdict(list) for phase in PHASES}
    with contextlib.ExitStack() as opened:
        sides: dict[str, Any] = {}
        for engine in RANKS:
            group = opened.enter_context(LocalGroup(str(folder), _config(options, engine)))
            sides[engine] = Ours(await _client(group))
        path = write_gguf(folder, folder.parent / "model.gguf", dtype)
        sides["llama.cpp"] = LlamaCpp(path, threads=cores, streams=16, context=1024)
        opened.callback(sides["llama.cpp"].close)
        sides["transformers"] = Theirs(folder, dtype)
        generator = torch.Generator().manual_seed(0)
        implementations: dict[str, Implementation] = {}
        for number in range(options.rounds + 1):  # the first round warms up, and checks
            for phase, (rows, tokens) in PHASES.items():
                batch = torch.randint(1, MEDIUM["vocab_size"], (rows, tokens), generator=generator)
                run, answers = phase.partition(",")[0], {}
                for engine in ENGINES:
                    if engine == "transformers":
                        if phase not in implementations:
                            implementations[phase] = await _fastest(sides[engine], run, batch)
                        sides[engine].use(implementations[phase])
                    wait_for_idle([os.getpid()], limit_s=IDLE_WAIT_S, cores=QUIET_CORES)
                    seconds, answers[engine] = await timed(getattr(sides[engine], run), batch)
                    counted = rows * (DECODE_STEPS if run == "decode" else tokens)
                    if number:
                        samples[phase][engine].append(counted / seconds)
                if run == "decode":
                    _check(phase, answers, options.dtype)
    summary = {phase: _medians(found) for phase, found in samples.items()}
    return Measured(samples, summary, {"model_config": MEDIUM}, f"_medium_{options.dtype}")


async def _fastest(theirs: Theirs, run: str, batch: torch.Tensor) -> Implementation:
    seconds = {}
    for choice in (Implementation(e, a) for e in EXPERTS for a in ATTENTION):
        theirs.use(choice)
        await timed(getattr(theirs, run), batch)
        seconds[choice], _ = await timed(getattr(theirs, run), batch)
    return min(seconds, key=seconds.__getitem__)


def _check(phase: str, answers: dict[str, list[int]], dtype: str) -> None:
    """Raise RuntimeError if first tokens differ more than near ties explain."""
    expected = answers["transformers"]
    for engine, found in answers.items():
        agree = sum(a == b for a, b in zip(found, expected, strict=True))
        if len(found) > 1 and agree < AGREEMENT[dtype] * len(found):
            raise RuntimeError(f"{phase}, {engine}: only {agree} of {len(found)} answers agree")


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians of tokens/s, and of the ratios to llama.cpp and `transformers` by round."""
    row: dict[str, Any] = {engine: statistics.median(found[engine]) for engine in ENGINES}
    for other in ("llama.cpp", "transformers"):
        for engine in RANKS:
            ratios = [a / b for a, b in zip(found[engine], found[other], strict=True)]
            row[f"{engine} / {other}"] = statistics.median(ratios)
    return row


def tables(summary: dict[str, Any]) -> list[Table]:
    rates = [[phase, *(f"{row[e]:,.0f}" for e in ENGINES)] for phase, row in summary.items()]
    names = [f"{engine} / {other}" for other in ("llama.cpp", "transformers") for engine in RANKS]
    ratios = [[phase, *(f"{row[name]:.2f}" for name in names)] for phase, row in summary.items()]
    return [
        Table("Tokens/s, medians", ["phase", *ENGINES], rates),
        Table("Medians of ratios by round", ["phase", *names], ratios),
    ]


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = write_random_checkpoint(Path(scratch) / "model", MEDIUM)
        return asyncio.run(_measure(options, folder))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)


CASES = [
    Case(
        "engines",
        "Beside llama.cpp and transformers",
        "Tokens/s of two ranks and of a colocated one beside llama.cpp (xllamacpp) and "
        "`transformers`, all cores for each.",
        measure,
        tables,
        add_options,
    )
]
