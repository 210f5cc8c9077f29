"""Bulk rows beside LS requests whose answer is one pass: on a prefill worker, and on an attention
and an expert rank alone. Bulk's part is of what LS leaves: of its rate alone, times the part of the
ranks' time that LS's own passes do not take (of two ranks, each has half of a pass). By processor
time it is of the rate alone per second of what the ranks spend beside what LS takes of them when it
is alone: whatever else runs on the machine is not in it, nor what ranks wait for."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load.on_rank import Endless
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.outcome import mean
from cluster.tools.bench.workload import Lengths, always, poisson

ROWS = (Endless(32, Lengths(256, 1)),)
LS_TOKENS, LS_PER_S = 64, 2.0
WARM_S = 4.0
PLACES = {"prefill worker": 1, "attention and expert rank": 2}  # ranks
LOADS = {"idle": (True, False), "bulk alone": (False, True), "both": (True, True)}  # LS, bulk


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        groups = {
            place: Group(path, Variant(place, prefill=ranks == 1), options.dtype)
            for place, ranks in PLACES.items()
            if options.only in place
        }
        for group in groups.values():
            await group.join()
        samples: dict[str, Any] = {}
        for number in range(options.rounds + 1):  # the first one warms up
            seconds = options.seconds if number else WARM_S
            arrivals = poisson(
                LS_PER_S, seconds, always(LS_TOKENS, 1), 1.0, random.Random(100 + number)
            )
            for place, group in groups.items():
                for load in LOADS if number % 2 else reversed(LOADS):
                    ls, be = LOADS[load]
                    group.variant = group.variant._replace(ls=ls, be=be)
                    measured, _ = await group.measure(arrivals, seconds, VOCABULARY, number, ROWS)
                    if number:
                        samples.setdefault(f"{place} | {load}", []).append(measured)
                        print(number, place, load, _short(measured), flush=True)
        for group in groups.values():
            await group.close()
        return samples


def _short(measured: dict[str, Any]) -> str:
    ls = measured["ls"]
    return (
        f"LS {ls['ttft_ms']:.0f}/{ls['ttft_p99_ms']:.0f} ms, bulk"
        f" {measured['be_tokens_per_s']:.0f} tokens/s, {measured['processor_s']:.2f} s for"
        f" {measured['be_tokens']} of its tokens"
    )


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Round by round, then the mean of the ratios."""
    found = {}
    for place, ranks in PLACES.items():
        if f"{place} | both" not in samples:
            continue
        idle, alone, both = (samples[f"{place} | {load}"] for load in LOADS)
        rounds = list(zip(idle, alone, both, strict=True))
        means, p99s = (
            [b["ls"][key] / i["ls"][key] for i, _, b in rounds]
            for key in ("ttft_ms", "ttft_p99_ms")
        )
        kept = [
            b["be_tokens_per_s"]
            / (a["be_tokens_per_s"] * (1 - LS_PER_S * i["ls"]["ttft_ms"] / 1e3 / ranks))
            for i, a, b in rounds
        ]
        by_processor = [
            b["be_tokens"]
            / (b["processor_s"] - i["processor_s"])
            / (a["be_tokens"] / a["processor_s"])
            for i, a, b in rounds
        ]
        found[place] = {
            "ls_mean_of_idle": round(mean(means), 2),
            "ls_p99_of_idle": round(mean(p99s), 2),
            "bulk_of_what_ls_leaves": round(mean(kept), 3),
            "by_processor_time": round(mean(by_processor), 3),
        }
    return found
