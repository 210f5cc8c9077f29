"""What preemption costs where there is nothing to preempt: processor time per token, and
throughput, with it over without it, pair by pair."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.load.arrivals import Arrival, Lengths
from contracts.requests import Priority

LOADS = {  # all come at once, and are waited for: no part of a batch is left out or counted twice
    "LS decode": [Arrival(0.0, Priority.LS, Lengths(64, 160))] * 16,
    "BE prefill": [Arrival(0.0, Priority.BE, Lengths(512, 1))] * 64,
}
VARIANTS = [Variant("on"), Variant("off", ["priority.preempt=false"])]
_TICKS = os.sysconf("SC_CLK_TCK")


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
        for group in groups:
            await group.close()
        return samples


async def _one(group: Group, arrivals: list[Arrival], seed: int) -> dict[str, float]:
    before_s = _processor_s(group)
    _, outcomes = await group.measure(arrivals, 0.1, VOCABULARY, seed)
    tokens = sum(sum(arrival.lengths) for arrival in arrivals)
    return {
        "us_per_token": 1e6 * (_processor_s(group) - before_s) / tokens,
        "tokens_per_s": tokens / max(each.end_s for each in outcomes),
    }


def _processor_s(group: Group) -> float:
    """Of both ranks, so far."""
    total = 0
    for process in group.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        total += sum(map(int, fields.split()[11:13]))
    return total / _TICKS


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for load, pairs in samples.items():
        for key in ("us_per_token", "tokens_per_s"):
            ratios = [pair["on"][key] / pair["off"][key] for pair in pairs]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            found[f"{load}, {key}, on over off"] = [round(each, 3) for each in quartiles]
    return found
