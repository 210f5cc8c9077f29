"""What preemption costs where there is nothing to preempt: processor time per token, and
throughput, with it over without it, pair by pair."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.workload import Lengths, RequestArrival
from contracts.requests import Priority

LOADS = {  # all come at once, and are waited for: no part of a batch is left out or counted twice
    "LS decode": [RequestArrival(0.0, Priority.LS, Lengths(64, 160))] * 16,
    "BE prefill": [RequestArrival(0.0, Priority.BE, Lengths(512, 1))] * 64,
}
VARIANTS = [Variant("on"), Variant("off", ["priority.preempt=false"])]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        groups = [Group(path, variant, options.dtype) for variant in VARIANTS]
        for group in groups:
            await group.join()
        samples: dict[str, Any] = {load: [] for load in LOADS}
        for number in range(options.rounds + 1):
            for load, arrivals in LOADS.items():
                pair = {}
                for group in groups if number % 2 else groups[::-1]:
                    pair[group.variant.name] = await _one(group, arrivals, number)
                if number:  # the first one warms up
                    samples[load].append(pair)
                    print(number, load, _short(pair), flush=True)
        for group in groups:
            await group.close()
        return samples


async def _one(group: Group, arrivals: list[RequestArrival], seed: int) -> dict[str, float]:
    before_s = group.processor_s()
    _, outcomes = await group.measure(arrivals, 0.1, VOCABULARY, seed)
    tokens = sum(sum(arrival.lengths) for arrival in arrivals)
    return {
        "us_per_token": 1e6 * (group.processor_s() - before_s) / tokens,
        "tokens_per_s": tokens / max(each.end_s for each in outcomes),
    }


def _short(pair: dict[str, dict[str, float]]) -> str:
    on, off = pair["on"], pair["off"]
    return ", ".join(f"{key} {on[key]:.1f} over {off[key]:.1f}" for key in on)


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for load, pairs in samples.items():
        for key in ("us_per_token", "tokens_per_s"):
            ratios = [pair["on"][key] / pair["off"][key] for pair in pairs]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            found[f"{load}, {key}, on over off"] = [round(each, 3) for each in quartiles]
    return found
