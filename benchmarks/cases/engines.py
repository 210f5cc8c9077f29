"""Tokens/s of two ranks and of a colocated one beside llama.cpp (xllamacpp), OpenVINO GenAI and
`transformers`, all cores for each. classify: prompt tokens/s of 32 rows of 512 that share 448, with
each engine's prefix cache. limit: the model's products, without a cache, at the rates of one core
(GEMM, memory reads), times the cores.

    pip install -e '.[bench,engines]' && python -m benchmarks engines --dtype bfloat16

llama.cpp takes part with the medium models, if its packages are installed, and OpenVINO with
`--openvino` (benchmarks/support/openvino_side.py). `transformers` runs its fastest implementation
of each phase.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.machine import core_rates
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.llama_cpp import LlamaCpp, write_gguf
from benchmarks.support.model_work import Rates, one_pass
from benchmarks.support.openvino_side import OpenVino
from benchmarks.support.others import wait_for_idle
from benchmarks.support.pinned_batches import bench_client
from benchmarks.support.random_checkpoint import (
    MEDIUM,
    MEDIUM_GLM4_MOE,
    MEDIUM_OLMOE,
    write_random_checkpoint,
)
from benchmarks.support.sides import (
    DECODE_STEPS,
    IMPLEMENTATIONS,
    Implementation,
    Ours,
    Theirs,
    fastest,
)
from contracts.config import TandemConfig
from contracts.loading import load_config
from models.spec.model import ModelSpec, read_spec
from tests.support.local_group import LocalGroup

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
MODELS = {"medium": MEDIUM, "medium_olmoe": MEDIUM_OLMOE, "medium_glm4_moe": MEDIUM_GLM4_MOE}
PREFILL = "prefill, 8 x 512"
# Rows and tokens of each.
PHASES = {
    "decode, 16 streams": (16, 32),
    "decode, 1 stream": (1, 32),
    PREFILL: (8, 512),
    "classify, 32 x 512, 448 shared": (32, 512),
}
SHARED = 448  # first tokens, equal in all rows to classify
RANKS = {
    "two ranks": [],
    "colocated": ["groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=1"],
}
QUIET_CORES, IDLE_WAIT_S = 0.15, 2.0
# Of first tokens: weights are random, and llama.cpp keeps K and V in float16.
AGREEMENT = {"float32": 0.8, "bfloat16": 0.4}


def _config(options: argparse.Namespace, engine: str) -> TandemConfig:
    threads = f"groups.torch_threads={os.cpu_count() or 1}"
    pool = "kv.pool_tokens=16384"
    dtype = f"model.dtype={options.dtype}"
    return load_config(None, [dtype, pool, threads, *RANKS[engine]])


async def _measure(options: argparse.Namespace, folder: Path, rates: Rates) -> Measured:
    dtype, spec = getattr(torch, options.dtype), read_spec(folder)
    samples: dict[str, dict[str, list[float]]] = {phase: defaultdict(list) for phase in PHASES}
    with contextlib.ExitStack() as opened:
        sides: dict[str, Any] = {}
        for engine in RANKS:
            group = opened.enter_context(LocalGroup(str(folder), _config(options, engine)))
            ((name, address),) = group.client_addresses.items()
            sides[engine] = Ours(await bench_client(name, address, group.token))
        if options.model in MODELS and importlib.util.find_spec("xllamacpp"):
            path = write_gguf(folder, folder.parent / "model.gguf", dtype)
            cores = os.cpu_count() or 1
            sides["llama.cpp"] = LlamaCpp(path, threads=cores, streams=16, context=1024)
            opened.callback(sides["llama.cpp"].close)
        if options.openvino is not None:
            exported = folder.parent / "openvino"
            sides["OpenVINO"] = OpenVino(
                options.openvino, folder, exported, options.dtype, DECODE_STEPS
            )
            opened.callback(sides["OpenVINO"].close)
        sides["transformers"] = Theirs(folder, dtype)
        generator = torch.Generator().manual_seed(0)
        chosen: dict[str, Implementation] = {}
        for number in range(options.rounds + 1):  # the first round warms up, and checks
            for phase, (rows, tokens) in PHASES.items():
                batch = torch.randint(1, spec.vocab_size, (rows, tokens), generator=generator)
                run, answers = phase.partition(",")[0], {}
                if run == "classify":
                    batch[:, :SHARED] = batch[0, :SHARED]
                for engine, side in sides.items():
                    if engine == "transformers":
                        if run == "classify":  # a prefill, without a prefix cache
                            chosen[phase] = chosen[PREFILL]
                        chosen[phase] = chosen.get(phase) or await _fastest(side, run, batch)
                        side.use(chosen[phase])
                    wait_for_idle([os.getpid()], limit_s=IDLE_WAIT_S, cores=QUIET_CORES)
                    seconds, answers[engine] = await _timed(side, run, batch)
                    if number:
                        counted = rows * (DECODE_STEPS if run == "decode" else tokens)
                        samples[phase][engine].append(counted / seconds)
                if run == "decode":
                    _check(phase, answers, options.dtype)
    summary = {phase: _medians(found) for phase, found in samples.items()}
    for phase, row in summary.items():
        row["limit"] = _limit(spec, dtype, phase, rates)
        row["implementation"] = ", ".join(chosen[phase])
    settings = {"model_config": MODELS.get(options.model, "models/bundled")}
    settings |= {"one_core": rates._asdict()}
    return Measured(samples, summary, settings, f"_{options.model}_{options.dtype}")


async def _timed(side: Any, run: str, batch: torch.Tensor) -> tuple[float, list[int]]:
    started_s = time.monotonic()
    answers = await getattr(side, run)(batch)
    return time.monotonic() - started_s, answers


async def _fastest(theirs: Theirs, run: str, batch: torch.Tensor) -> Implementation:
    async def timed(choice: Implementation) -> float:
        theirs.use(choice)
        return (await _timed(theirs, run, batch))[0]

    return await fastest(IMPLEMENTATIONS, timed)


def _check(phase: str, answers: dict[str, list[int]], dtype: str) -> None:
    """Raise RuntimeError if first tokens differ more than near ties explain."""
    expected = answers["transformers"]
    for engine, found in answers.items():
        agree = sum(a == b for a, b in zip(found, expected, strict=True))
        if len(found) > 1 and agree < AGREEMENT[dtype] * len(found):
            raise RuntimeError(f"{phase}, {engine}: only {agree} of {len(found)} answers agree")


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians of tokens/s, and of the ratios to the other engines by round."""
    row: dict[str, Any] = {engine: statistics.median(rates) for engine, rates in found.items()}
    for other in found.keys() - RANKS.keys():
        for engine in RANKS:
            ratios = [a / b for a, b in zip(found[engine], found[other], strict=True)]
            row[f"{engine} / {other}"] = statistics.median(ratios)
    return row


def _limit(spec: ModelSpec, dtype: torch.dtype, phase: str, rates: Rates) -> float:
    """Return tokens/s if all cores multiplied, or read weights and cache, at the rate of one."""
    rows, tokens = PHASES[phase]
    passes, made = [one_pass(spec, dtype, rows=rows, new_tokens=tokens, context=0)], tokens
    if phase.startswith("decode"):
        made = DECODE_STEPS
        passes += [
            one_pass(spec, dtype, rows=rows, new_tokens=1, context=tokens + step)
            for step in range(DECODE_STEPS - 1)
        ]
    seconds = sum(part.seconds(rates) for each in passes for part in each)
    return rows * made * (os.cpu_count() or 1) / seconds


def tables(summary: dict[str, Any]) -> list[Table]:
    shared = ", 32 x 512, 448 shared"
    rows = [(phase.removesuffix(shared), row) for phase, row in summary.items()]
    others = [name for name in ("llama.cpp", "OpenVINO", "transformers") if name in rows[0][1]]
    engines, limit = [*RANKS, *others], "colocated / limit"
    parts = {phase: f"{row['colocated'] / row['limit']:.0%}" for phase, row in rows}
    ratios = [f"{engine} / {other}" for other in others for engine in RANKS]
    return [
        Table(
            "Tokens/s, medians",
            ["phase", *engines, limit],
            [[phase, *(f"{row[e]:,.0f}" for e in engines), parts[phase]] for phase, row in rows],
        ),
        Table(
            "Medians of ratios by round",
            ["phase", *ratios],
            [[phase, *(f"{row[name]:.2f}" for name in ratios)] for phase, row in rows],
        ),
    ]


def measure(options: argparse.Namespace) -> Measured:
    rates = core_rates(getattr(torch, options.dtype))
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = BUNDLED
        if options.model in MODELS:
            folder = write_random_checkpoint(Path(scratch) / "model", MODELS[options.model])
        return asyncio.run(_measure(options, folder, rates))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=(*MODELS, "bundled"), default="medium")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openvino", type=Path, help="python with optimum-intel, openvino-genai")


CASE = documented_case(__doc__, "Beside llama.cpp and transformers", measure, tables, add_options)
