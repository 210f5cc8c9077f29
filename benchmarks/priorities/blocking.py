"""For how long LS can have been ready while BE ran, wait by wait, on every rank.

By processor time of the rank's loop: the ranks and the client share cores, and what the operating
system gives to others is not the slice's. By the clock beside it."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.on_rank import Endless
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.load.arrivals import Lengths, always, poisson
from cluster.load.outcome import mean, percentile

ENDLESS = (Endless(16, Lengths(512, 1)),)
LS_PER_S, LS_LENGTHS = 1.0, always(64, 50)
PLACES = {"attention and expert rank": False, "prefill worker": True}
WARM_S = 6.0
MODULE = "benchmarks.blocked_rank"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        samples: dict[str, Any] = {}
        for place, prefill in PLACES.items():
            if options.only not in place:
                continue
            variant = Variant(place, ["schedule.max_batch_tokens=4096"], prefill=prefill)
            group = Group(path, variant, options.dtype, module=MODULE)
            await group.join()
            for number in range(options.rounds + 1):  # the first one warms up
                seconds = options.seconds if number else WARM_S
                rng = random.Random(number)
                arrivals = poisson(LS_PER_S, seconds, LS_LENGTHS, 1.0, rng)
                await group.measure(arrivals, seconds, VOCABULARY, number, ENDLESS)
                for process in group.processes:
                    told = msgspec.json.decode(process.call("metrics").result(60.0))
                    if number:
                        figures = _figures(told["waits"], told["slices_s"])
                        samples.setdefault(process.name, []).append(figures)
                        print(number, process.name, figures, flush=True)
            await group.close()
        return samples


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
    return {
        name: {
            key: sum(values) if key.endswith("s") and "_ms" not in key else _of(key, values)
            for key in rounds[0]
            if (values := [each[key] for each in rounds])
        }
        for name, rounds in samples.items()
    }


def _of(key: str, values: list[float]) -> float:
    return round(mean(values), 2) if "_mean_" in key else max(values)
