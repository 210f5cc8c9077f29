"""LS without end, more than the ranks can do, and what BE gets of them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load.on_rank import Endless, Generator
from benchmarks.priorities.group import MODELS, VOCABULARY, Group, Variant
from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.tools.bench.workload import Lengths
from contracts.requests import Priority

LS = Endless(96, Lengths(128, 8), Priority.LS)
BE = Endless(4, Lengths(512, 1), Priority.BE)
SHARES = (0.05, 0.1, 0.2)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "model", MODELS[options.model])
        samples: dict[str, Any] = {}
        for share in SHARES:
            group = Group(path, Variant(f"{share}", [f"priority.be_share={share}"]), options.dtype)
            await group.join()
            for name, endless in {"alone": [BE], "beside LS": [LS, BE]}.items():
                generator = Generator(group.client, VOCABULARY, 1)
                seconds = options.seconds if len(endless) > 1 else options.seconds / 4
                _, per_s = await generator.run([], seconds, endless)
                turnarounds_s = generator.turnarounds_s[Priority.BE]
                samples[f"be_share {share} | {name}"] = {
                    "be_tokens_per_s": per_s[Priority.BE],
                    "ls_tokens_per_s": per_s[Priority.LS],
                    "be_requests": len(turnarounds_s),
                    "longest_be_s": max(turnarounds_s, default=float("nan")),
                }
                print(share, name, samples[f"be_share {share} | {name}"], flush=True)
            await group.close()
        return samples


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for share in SHARES:
        alone, beside = (samples[f"be_share {share} | {x}"] for x in ("alone", "beside LS"))
        found[f"be_share {share}"] = {
            "be_of_alone": round(beside["be_tokens_per_s"] / alone["be_tokens_per_s"], 3),
            "longest_be_s": round(beside["longest_be_s"], 2),
            "bound_s": round(alone["longest_be_s"] / share, 2),
        }
    return found
