"""Prefill and decode tokens/s of one attention and one expert rank beside `transformers`,
on the same two cores, checkpoint, rows and dtype, interleaved in one run.

    python -m benchmarks beside_transformers --model medium --dtype bfloat16

Each side runs its fastest configuration of a phase: our plan; its experts and attention.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from actors.channels.handshake import Identity
from benchmarks.cases.machine import core_rates
from benchmarks.harness import Case, Measured, Table
from benchmarks.support.model_work import Pass, Rates, one_pass
from benchmarks.support.others import Others, quietest, wait_for_idle
from benchmarks.support.random_checkpoint import MEDIUM, MEDIUM_SHARED, write_random_checkpoint
from benchmarks.support.sides import DECODE_STEPS, Implementation, Ours, Theirs
from cluster.routing.rank_client import RankClient
from contracts.config import TandemConfig
from contracts.loading import load_config
from contracts.plan import Plan
from models.spec.model import ModelSpec, read_spec
from tests.support.local_group import LocalGroup

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
RANDOM = {"medium": MEDIUM, "medium-shared": MEDIUM_SHARED}
PLANS = {"prefill": [Plan(r1=2), Plan(r1=4), Plan(r1=4, r2=2)], "decode": [Plan(r1=1), Plan(r1=2)]}
# "batched_mm" copies the expert weights for every token.
EXPERTS = ("eager", "grouped_mm")
ATTENTION = ("sdpa", "eager")
DECODE_ROWS, DECODE_PROMPT = 16, 32
# Rounds in which other programs used more are not counted if enough others remain.
QUIET_CORES, IDLE_WAIT_S = 0.15, 2.0
TRIALS, HOPELESS = 1, 1.5
# Fraction of equal first tokens. Weights are random: bfloat16 decides near ties either way.
AGREEMENT = {"float32": 0.95, "bfloat16": 0.7}

T = TypeVar("T")


class Workload(NamedTuple):
    """Rows of a phase, tokens of a run, and its passes."""

    phase: str
    rows: torch.Tensor
    tokens: int
    passes: list[Pass]


class Sample(NamedTuple):
    """tokens/s by side, and the cores that other programs kept busy in the worse half."""

    rates: dict[str, float]
    others_cores: float


class Bench:
    """Both sides, ready to run."""

    def __init__(
        self, group: LocalGroup, client: RankClient, theirs: Theirs, agreement: float
    ) -> None:
        self._group = group
        self._name = client.name
        self._sides = {"tandem": Ours(client), "transformers": theirs}
        self._theirs = theirs
        self._agreement = agreement
        self._pids = [os.getpid(), *(process.pid for process in group.processes.values())]

    def pin(self, plan: Plan) -> None:
        self._group.processes[self._name].call("pin_plan", plan).result(10.0)

    def use(self, implementation: Implementation) -> None:
        self._theirs.use(implementation)

    async def best(self, work: Workload) -> tuple[Plan, Implementation, dict[str, float]]:
        """Return the fastest plan and implementation, and the seconds of each choice."""
        plans = {plan.label: plan for plan in PLANS[work.phase]}
        implementations = {
            f"{experts} experts, {attention} attention": Implementation(experts, attention)
            for experts in EXPERTS
            for attention in ATTENTION
        }
        ours_s = await self._trials("tandem", work, plans, self.pin)
        theirs_s = await self._trials("transformers", work, implementations, self.use)
        return (
            plans[min(ours_s, key=ours_s.__getitem__)],
            implementations[min(theirs_s, key=theirs_s.__getitem__)],
            ours_s | theirs_s,
        )

    async def _trials(
        self, side: str, work: Workload, choices: dict[str, T], choose: Callable[[T], None]
    ) -> dict[str, float]:
        """Return the shortest time of each choice; a hopeless one is not repeated."""
        run = getattr(self._sides[side], work.phase)
        seconds: dict[str, float] = {}
        for label, choice in choices.items():
            choose(choice)
            wait_for_idle(self._pids, limit_s=IDLE_WAIT_S, cores=QUIET_CORES)
            times = [(await timed(run, work.rows))[0]]
            if times[0] <= HOPELESS * min(seconds.values(), default=times[0]):
                times += [(await timed(run, work.rows))[0] for _ in range(TRIALS)]
            seconds[label] = min(times)
            print(f"{work.phase}, {label}: {seconds[label]:.2f} s", flush=True)
        return seconds

    async def round(self, work: Workload) -> Sample:
        """Run each side once. Raises RuntimeError if their answers differ."""
        rates, answers, others_cores = {}, [], 0.0
        wait_for_idle(self._pids, limit_s=IDLE_WAIT_S, cores=QUIET_CORES)
        for side, runner in self._sides.items():
            others = Others(self._pids)
            seconds, answer = await timed(getattr(runner, work.phase), work.rows)
            others_cores = max(others_cores, others.cores())
            rates[side] = work.tokens / seconds
            answers.append(answer)
        agree = sum(a == b for a, b in zip(*answers, strict=True))
        if agree < self._agreement * len(work.rows):
            raise RuntimeError(f"{work.phase}: only {agree} of {len(work.rows)} answers agree")
        return Sample(rates, others_cores)


def _config(options: argparse.Namespace) -> TandemConfig:
    return load_config(
        None,
        [
            f"model.dtype={options.dtype}",
            "kv.prefix_cache=false",
            f"kv.pool_tokens={4 * options.sequences * options.tokens}",
        ],
    )


def workloads(
    spec: ModelSpec, options: argparse.Namespace, generator: torch.Generator
) -> list[Workload]:
    """Return new rows for both phases."""
    dtype, limit = getattr(torch, options.dtype), spec.vocab_size
    prompts = torch.randint(1, limit, (options.sequences, options.tokens), generator=generator)
    starts = torch.randint(1, limit, (DECODE_ROWS, DECODE_PROMPT), generator=generator)
    whole = one_pass(spec, dtype, rows=len(prompts), new_tokens=options.tokens, context=0)
    steps = [one_pass(spec, dtype, rows=DECODE_ROWS, new_tokens=DECODE_PROMPT, context=0)]
    steps += [
        one_pass(spec, dtype, rows=DECODE_ROWS, new_tokens=1, context=DECODE_PROMPT + step)
        for step in range(DECODE_STEPS - 1)
    ]
    return [
        Workload("prefill", prompts, prompts.numel(), [whole]),
        Workload("decode", starts, DECODE_ROWS * DECODE_STEPS, steps),
    ]


async def _measure(
    group: LocalGroup, folder: Path, rates: Rates, options: argparse.Namespace
) -> Measured:
    ((name, address),) = group.client_addresses.items()
    client = RankClient(name, address, Identity(name="bench", token=group.token, epoch=None))
    client.start()
    await client.wait_until(lambda ready: ready.problem is None)
    theirs = Theirs(folder, getattr(torch, options.dtype))
    bench = Bench(group, client, theirs, AGREEMENT[options.dtype])
    generator = torch.Generator().manual_seed(0)
    spec = read_spec(folder)
    first = workloads(spec, options, generator)
    choices: dict[str, Any] = {work.phase: await bench.best(work) for work in first}
    samples: dict[str, list[Sample]] = {work.phase: [] for work in first}
    for number in range(options.rounds + 1):  # the first round warms up, and checks
        for work in workloads(spec, options, generator):
            plan, implementation, _ = choices[work.phase]
            bench.pin(plan)
            bench.use(implementation)
            sample = await bench.round(work)
            print(
                work.phase, {side: round(rate) for side, rate in sample.rates.items()}, flush=True
            )
            if number:
                samples[work.phase].append(sample)
    await client.close()
    return _finish(samples, choices, first, rates, options)


def _finish(
    samples: dict[str, list[Sample]],
    choices: dict[str, Any],
    works: list[Workload],
    rates: Rates,
    options: argparse.Namespace,
) -> Measured:
    phases = {}
    for work in works:
        plan, implementation, tried_s = choices[work.phase]
        taken = quietest(samples[work.phase], QUIET_CORES)
        ratios = sorted(one.rates["tandem"] / one.rates["transformers"] for one in taken)
        row: dict[str, Any] = {
            "tokens_per_s": {
                side: statistics.median(one.rates[side] for one in taken)
                for side in ("tandem", "transformers")
            },
            "ratio_median": statistics.median(ratios),
            "ratios": ratios,
        }
        row["gemm_rate_fraction"] = gemm_fraction(
            work.passes, work.tokens, row["tokens_per_s"]["tandem"], rates
        )
        choice = f"{implementation.experts}, {implementation.attention}"
        phases[work.phase] = {
            **row,
            "rounds_counted": len(taken),
            "others_cores_most": max(sample.others_cores for sample in taken),
            "plan": plan.label,
            "implementation": choice,
            "tried_s": tried_s,
        }
    raw = {phase: [sample._asdict() for sample in taken] for phase, taken in samples.items()}
    model = RANDOM.get(options.model, {"folder": "models/bundled"})
    suffix = f"_{options.model.replace('-', '_')}_{options.dtype}"
    return Measured(
        raw, {"phases": phases, "one_core": rates._asdict()}, {"model_config": model}, suffix
    )


def gemm_fraction(passes: Sequence[Pass], tokens: int, tokens_per_s: float, rates: Rates) -> float:
    """Return the fraction of the GEMM rate of all cores that a phase reaches."""
    flops_per_token = sum(each.flops for each in passes) / tokens
    return flops_per_token * tokens_per_s / (rates.flops_per_s * (os.cpu_count() or 1))


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for phase, row in summary["phases"].items():
        medians, ratios = row["tokens_per_s"], row["ratios"]
        rows.append(
            [
                phase,
                f"{medians['tandem']:.0f} ({row['plan']})",
                f"{medians['transformers']:.0f} ({row['implementation']})",
                f"{row['ratio_median']:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})",
                f"{row['gemm_rate_fraction']:.0%}",
            ]
        )
    columns = ["phase", "tandem", "transformers", "ratio (worst, best)", "of GEMM rate"]
    return [Table("Tokens/s, medians", columns, rows)]


async def timed(
    run: Callable[[torch.Tensor], Awaitable[Any]], rows: torch.Tensor
) -> tuple[float, Any]:
    started_s = time.monotonic()
    answer = await run(rows)
    return time.monotonic() - started_s, answer


def measure(options: argparse.Namespace) -> Measured:
    rates = core_rates(getattr(torch, options.dtype))
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = BUNDLED
        if options.model in RANDOM:
            folder = write_random_checkpoint(Path(scratch) / "model", RANDOM[options.model])
        with LocalGroup(str(folder), _config(options)) as group:
            if os.cpu_count() == 2:
                for core, process in enumerate(group.processes.values()):
                    os.sched_setaffinity(process.pid, {core})
            return asyncio.run(_measure(group, folder, rates, options))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=(*RANDOM, "bundled"), default="medium")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="per sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=6)


CASES = [
    Case(
        "beside_transformers",
        "Beside transformers",
        "Prefill and decode tokens/s of one attention and one expert rank beside `transformers` "
        "on the same two cores.",
        measure,
        tables,
        add_options,
    )
]
