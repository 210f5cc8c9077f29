"""For how long LS can have been ready while BE ran, wait by wait, on every rank.

By processor time of the rank's loop: the ranks and the client share cores, and what the operating
system gives to others is not the slice's. By the clock beside it. Of what is longer than a slice
should be (LONG_S in benchmarks/blocked_rank.py): what it was, and what can have made it long."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.on_rank import Endless
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.slice_trace import Part
from cluster.tools.bench.outcome import mean, percentile
from cluster.tools.bench.workload import Lengths, always, poisson

ENDLESS = (Endless(16, Lengths(512, 1)),)
LS_PER_S, LS_LENGTHS = 1.0, always(64, 50)
PLACES = {"attention and expert rank": False, "prefill worker": True}
WARM_S = 6.0
MODULE = "benchmarks.blocked_rank"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        samples: dict[str, Any] = {"stalls_ms": _stalls_ms(options.seconds)}
        for place, prefill in PLACES.items():
            if options.only in place:
                await _measure(path, options, samples, place, prefill)
        return samples


async def _measure(
    path: Path, options: argparse.Namespace, samples: dict[str, Any], place: str, prefill: bool
) -> None:
    variant = Variant(place, ["schedule.max_batch_tokens=4096"], prefill=prefill)
    group = Group(path, variant, options.dtype, module=MODULE)
    await group.join()
    for number in range(options.rounds + 1):  # the first one: all sizes are new
        seconds = options.seconds if number else WARM_S
        rng = random.Random(number)
        arrivals = poisson(LS_PER_S, seconds, LS_LENGTHS, 1.0, rng)
        await group.measure(arrivals, seconds, VOCABULARY, number, ENDLESS)
        for process in group.processes:
            told = msgspec.json.decode(process.call("metrics").result(60.0))
            figures = _figures(told["waits"], told["slices_s"])
            figures["long"] = [_cause(*each) for each in told["long"]]
            name = process.name if number else f"{process.name}, cold"
            samples.setdefault(name, []).append(figures)
            print(number, name, figures, flush=True)
    await group.close()


def _stalls_ms(seconds: float) -> list[list[float]]:
    """Of a thread on each core that only reads clocks: what slices cannot be blamed for."""
    command = [sys.executable, "-m", "benchmarks.stalls", str(seconds)]
    return [
        json.loads(subprocess.run([*command, str(core)], check=True, capture_output=True).stdout)
        for core in sorted(os.sched_getaffinity(0))
    ]


def _cause(kind: str, seconds: float, parts: list[list[Any]]) -> dict[str, Any]:
    """Of a slice or a wait, what took longest of it (slice_trace.Part)."""
    part = Part(*max(parts, key=lambda part: part[1]))
    compiled_ms = sum(float(each.split()[-2]) for each in part.compiled)
    longest = part._asdict() | {"compiled": len(part.compiled), "compiled_ms": compiled_ms}
    return {"kind": kind, "ms": round(1e3 * seconds, 2), "longest_part": longest}


def _figures(waits: list[list[float]], slices_s: list[float]) -> dict[str, Any]:
    """In ms. beyond: of a wait what is not the slice of BE."""
    columns = {
        "wait": [wait for _, wait, _ in waits],
        "wait_by_the_clock": [clock for *_, clock in waits],
        "beyond_the_slice": [wait - of_be for of_be, wait, _ in waits],
        "slice": slices_s,
    }
    return {"waits": len(waits), "slices": len(slices_s)} | {
        f"{name}_{which}_ms": round(1e3 * figure, 2)
        for name, seconds in columns.items()
        for which, figure in (
            ("mean", mean(seconds)),
            ("p99", percentile(seconds, 0.99)),
            ("longest", max(seconds, default=0.0)),
        )
    }


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Over all rounds: how many, the mean of means, and the longest of all."""
    found: dict[str, Any] = {"stalls_ms": samples["stalls_ms"]}
    for name, rounds in samples.items():
        if name != "stalls_ms":
            of = {key: [each[key] for each in rounds] for key in rounds[0] if key != "long"}
            found[name] = {key: _of(key, values) for key, values in of.items()}
    return found


def _of(key: str, values: list[float]) -> float:
    if not key.endswith("_ms"):
        return sum(values)
    return round(mean(values), 2) if "_mean_" in key else max(values)
