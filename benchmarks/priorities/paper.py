"""QLLM's run (Section 4): chats, a fifth of them LS, 32 slots, Poisson arrivals; beside its
baseline and those that it does not compare with."""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant, blocking
from benchmarks.support.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.outcome import mean
from cluster.tools.bench.workload import Lengths, chat_lengths, poisson

LS_PART = 0.2
WHOLE, FCFS = "run to completion", "iteration FCFS"
SLOTS = ["schedule.max_batch_sequences=32", "schedule.max_batch_tokens=2048"]
OFF = ["priority.preempt=false", *SLOTS]
VARIANTS = [
    Variant(WHOLE, OFF, "static_batching", classless=True),
    Variant(FCFS, OFF, classless=True),
    Variant("iteration priority", OFF),
    Variant("ours", SLOTS),
    Variant("ours, ls_ttft_s=0", [*SLOTS, "priority.ls_ttft_s=0"]),
]
ALONE = "LS alone"  # ours, without BE: no policy's first tokens come sooner
RATES = ((0.45, WHOLE), (0.9, WHOLE), (0.8, FCFS), (0.95, FCFS), (1.2, FCFS))  # of whose capacity
ITERATIONS = 10  # of a decode: the paper's objective for a first token
MOST = Lengths(512, 160)
BURST = poisson(1e4, 0.012, chat_lengths(MOST), LS_PART, random.Random(5))
WARM_JOBS = 24


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        groups = {
            variant.name: Group(path, variant, options.dtype)
            for variant in VARIANTS
            if _wanted(options.only, variant.name)
        }
        for group in groups.values():
            await group.join()
        capacities = await _capacities(groups, options.capacities)
        print("capacities, jobs/s:", capacities, flush=True)
        samples: dict[str, Any] = {"capacities_jobs_per_s": capacities}
        for number in range(options.rounds):
            for part, reference in RATES:
                if options.load not in f"{part} of {reference}":
                    continue
                rng = random.Random(17 * number + round(100 * part))
                rate = part * capacities[reference]
                arrivals = poisson(rate, options.seconds, chat_lengths(MOST), LS_PART, rng)
                for variant in _turns(number):
                    if not _wanted(options.only, variant.name):
                        continue
                    if variant.batching and reference != variant.name:
                        continue  # beyond its capacity only its queue grows
                    group = groups["ours" if variant.name == ALONE else variant.name]
                    group.variant = variant
                    before = group.metrics()
                    measured, outcomes = await group.measure(
                        arrivals, options.seconds, VOCABULARY, number
                    )
                    measured["blocking"] = blocking(before, group.metrics())
                    last_s = max(each.end_s for each in outcomes)
                    measured |= {"rate": rate, "jobs_per_s": len(outcomes) / last_s}
                    samples.setdefault(f"{part} of {reference} | {variant.name}", []).append(
                        measured
                    )
                    print(number, part, variant.name, _short(measured), flush=True)
        for group in groups.values():
            await group.close()
        return samples


async def _capacities(groups: dict[str, Group], known: list[float]) -> dict[str, float]:
    """Jobs per second of run to completion and of iteration FCFS; measured, if not known."""
    if known:
        for group in groups.values():
            await group.measure(BURST[:WARM_JOBS], 0.1, VOCABULARY, 1)
        return dict(zip((WHOLE, FCFS), known, strict=True))
    return {name: await _capacity(groups[name]) for name in (WHOLE, FCFS) if name in groups}


def _wanted(only: str, name: str) -> bool:
    return any(each in name for each in only.split("|"))


def _turns(number: int) -> list[Variant]:
    turns = [*VARIANTS, Variant(ALONE, SLOTS, be=False)]
    return turns if number % 2 else turns[::-1]


async def _capacity(group: Group) -> float:
    """Jobs per second, of tokens per second while its slots are full. It is warm after the first of
    two bursts."""
    await group.measure(BURST, 0.1, VOCABULARY, 1)
    _, outcomes = await group.measure(BURST, 0.1, VOCABULARY, 2)
    times_s = sorted(itertools.chain.from_iterable(each.tokens_s for each in outcomes))
    first, last = len(times_s) // 10, len(times_s) * 3 // 4
    tokens_per_s = (last - first) / (times_s[last] - times_s[first])
    return tokens_per_s * len(outcomes) / len(times_s)


def _short(measured: dict[str, Any]) -> str:
    ls, be = measured["ls"], measured["be"]
    return (
        f"LS TTFT {ls['ttft_ms']:.0f}/{ls['ttft_p99_ms']:.0f} ms, turnaround"
        f" {ls['turnaround_s']:.2f} s, BE {be['turnaround_s']:.2f} s,"
        f" {measured['jobs_per_s']:.2f} jobs/s"
    )


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Means over rounds."""
    found: dict[str, Any] = {"capacities": samples["capacities_jobs_per_s"]}
    for name, rounds in samples.items():
        if not isinstance(rounds, list):
            continue
        row = {
            f"{priority}_{key}": round(mean([each[priority][key] for each in rounds]), digits)
            for priority, key, digits in (
                ("ls", "ttft_ms", 1),
                ("ls", "ttft_p99_ms", 1),
                ("ls", "tbt_ms", 1),
                ("ls", "turnaround_s", 3),
                ("be", "turnaround_s", 3),
            )
        }
        for key in ("rate", "jobs_per_s"):
            row[key] = round(mean([each[key] for each in rounds]), 3)
        found[name] = row
    return found
