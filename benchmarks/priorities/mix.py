"""Endless BE prompts, and LS requests at random beside them."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load.on_rank import Endless
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant, blocking
from benchmarks.support.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.outcome import mean
from cluster.tools.bench.workload import Lengths, RequestArrival, always, poisson

ENDLESS = (Endless(16, Lengths(512, 1)),)
LOADS = {"1 out, 2/s": (2.0, 1), "50 out, 1/s": (1.0, 50)}
BUDGETS = (256, 512, 1024, 2048, 4096)
OURS = Variant("ours", ["schedule.max_batch_tokens=4096"])
AT_ONCE = Variant("ours, ls_ttft_s=0", [*OURS.overrides, "priority.ls_ttft_s=0"])
EAGER = Variant("ours, ls_tbt_s=0.02", [*OURS.overrides, "priority.ls_tbt_s=0.02"])
WARM_S = 4.0


def variants(budgets: list[int]) -> list[Variant]:
    off = ["priority.preempt=false"]
    return [
        OURS._replace(name="idle", be=False),
        OURS._replace(name="BE alone", ls=False),
        Variant("BE alone, off", [*off, *OURS.overrides], ls=False),
        OURS,
        AT_ONCE,
        EAGER,
        Variant("iteration FCFS 4096", [*off, *OURS.overrides], classless=True),
        *(
            Variant(f"iteration priority {budget}", [*off, f"schedule.max_batch_tokens={budget}"])
            for budget in budgets
        ),
    ]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        samples: dict[str, Any] = {}
        for load, (rate, output) in LOADS.items():
            if options.load in load:
                samples[load] = await _load(path, options, rate, output)
        return samples


async def _load(path: Path, options: argparse.Namespace, rate: float, output: int) -> Any:
    only = options.only.split("|")
    wanted = [v for v in variants(options.budgets) if any(each in v.name for each in only)]
    found: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in wanted}
    shared: dict[tuple[Any, ...], Group] = {}  # variants that differ in the load alone
    for number in range(options.rounds + 1):  # the first one warms up
        seconds = options.seconds if number else WARM_S
        arrivals: list[RequestArrival] = poisson(
            rate, seconds, always(64, output), 1.0, random.Random(number)
        )
        for variant in wanted if number % 2 else reversed(wanted):
            key = (*variant.overrides, variant.batching)
            if key not in shared:
                shared[key] = Group(path, variant, options.dtype)
                await shared[key].join()
            group = shared[key]
            group.variant = variant
            before = group.metrics()
            measured, _ = await group.measure(arrivals, seconds, VOCABULARY, number, ENDLESS)
            measured["blocking"] = blocking(before, group.metrics())
            if number:
                found[variant.name].append(measured)
                print(number, variant.name, _short(measured), flush=True)
    for group in shared.values():
        await group.close()
    return found


def _short(measured: dict[str, Any]) -> str:
    ls = measured["ls"]
    return (
        f"TTFT {ls['ttft_ms']:.0f}/{ls['ttft_p99_ms']:.0f} TBT {ls['tbt_ms']:.0f}/"
        f"{ls['tbt_p99_ms']:.0f} BE {measured['be_tokens_per_s']:.0f} {measured['blocking']}"
    )


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Means over rounds."""
    found: dict[str, Any] = {}
    for load, by_variant in samples.items():
        for name, rounds in by_variant.items():
            if not rounds:
                continue
            row = {
                key: round(mean([each["ls"][key] for each in rounds]), 1)
                for key in ("ttft_ms", "ttft_p50_ms", "ttft_p99_ms", "tbt_ms", "tbt_p99_ms")
            }
            row["be_tokens_per_s"] = round(mean([each["be_tokens_per_s"] for each in rounds]))
            found[f"{load} | {name}"] = row
    return found
