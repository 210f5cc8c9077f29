"""QLLM's run (Section 4): chats, a fifth of them LS, 32 slots, Poisson arrivals; beside its
baseline and those that it does not compare with."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load.arrivals import Lengths, like_chats, poisson
from benchmarks.load.outcome import mean
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant, blocking
from benchmarks.random_checkpoint import write_random_checkpoint

LS_PART = 0.2
SLOTS = ["schedule.max_batch_sequences=32", "schedule.max_batch_tokens=2048"]
OFF = ["priority.preempt=false", *SLOTS]
VARIANTS = [
    Variant("run to completion", OFF, "run_to_completion", classless=True),
    Variant("iteration FCFS", OFF, classless=True),
    Variant("iteration priority", OFF),
    Variant("ours", SLOTS),
]
RATES = (0.33, 0.95, 1.2)  # of continuous batching's capacity
RUN_TO_COMPLETION_BELOW = 0.4  # beyond it only its queue grows
CAPACITY_S = 15.0
MOST = Lengths(512, 160)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        groups = {variant.name: Group(path, variant, options.dtype) for variant in VARIANTS}
        for group in groups.values():
            await group.join()
        capacity = await _capacity(groups)
        samples: dict[str, Any] = {"capacity_jobs_per_s": capacity}
        for number in range(options.rounds):
            for rate in RATES:
                rng = random.Random(17 * number + round(100 * rate))
                arrivals = poisson(rate * capacity, options.seconds, like_chats(MOST), LS_PART, rng)
                for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                    if variant.batching and rate > RUN_TO_COMPLETION_BELOW:
                        continue
                    group = groups[variant.name]
                    before = group.metrics()
                    measured, _ = await group.measure(arrivals, options.seconds, VOCABULARY, number)
                    measured["blocking"] = blocking(before, group.metrics())
                    samples.setdefault(f"{rate} | {variant.name}", []).append(measured)
                    print(number, rate, variant.name, _short(measured), flush=True)
        for group in groups.values():
            await group.close()
        return samples


async def _capacity(groups: dict[str, Group]) -> float:
    """Jobs per second of continuous batching when all come at once; all are warm after it."""
    found = 0.0
    for name, group in groups.items():
        burst = poisson(1e4, 0.012, like_chats(MOST), LS_PART, random.Random(5))
        _, outcomes = await group.measure(burst, 0.1, VOCABULARY, 1)
        if name == "iteration FCFS":
            ends = sorted(each.end_s for each in outcomes)
            most = len(ends) * 3 // 4  # while its slots are full
            found = most / ends[most - 1]
    print(f"capacity: {found:.2f} jobs/s")
    return found


def _short(measured: dict[str, Any]) -> str:
    ls, be = measured["ls"], measured["be"]
    return (
        f"LS TTFT {ls['ttft_ms']:.0f}/{ls['ttft_p99_ms']:.0f} ms, turnaround"
        f" {ls['turnaround_s']:.2f} s, BE {be['turnaround_s']:.2f} s,"
        f" {ls['jobs_per_s'] + be['jobs_per_s']:.2f} jobs/s"
    )


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"capacity": samples["capacity_jobs_per_s"]}
    for name, rounds in samples.items():
        if not isinstance(rounds, list):
            continue
        found[name] = {
            "ls_ttft_ms": round(mean([each["ls"]["ttft_ms"] for each in rounds]), 1),
            "ls_ttft_p99_ms": round(mean([each["ls"]["ttft_p99_ms"] for each in rounds]), 1),
            "ls_tbt_ms": round(mean([each["ls"]["tbt_ms"] for each in rounds]), 1),
            "ls_turnaround_s": round(mean([each["ls"]["turnaround_s"] for each in rounds]), 3),
            "be_turnaround_s": round(mean([each["be"]["turnaround_s"] for each in rounds]), 3),
        }
    return found
