"""Bytes between ranks, and the time of a batch, by where experts stand: the bundled model, held-out
rows, experts in order, as the solver places them, and with a quarter more slots.

    python -m benchmarks.placed_bytes --data DATA                over shared memory
    python -m benchmarks.placed_bytes --data DATA --mbit 40      over a link of that rate

With --mbit the attention rank and the expert ranks are in two network namespaces of this machine
(root, iproute2). All groups are up at once and take turns, each first as often as the others;
ratios are of one round, and rounds count in which all of them ran the same batches (a row goes
ahead; the time is from its end to the end of the last). `cpu_ratio`: of the CPU time of all ranks,
which other work on the machine disturbs less. Placements are of the profile beside the checkpoint;
`predicted` bytes are of the copies that the rows' routing has under them
(planner/placement/routing.py), which no rank has anything to do with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Result, write_result
from benchmarks.placed_groups import Ran, Running, batches_of, groups, placements_of, ran, warm
from benchmarks.placement.traces import BUNDLED, rows_of, traced
from benchmarks.two_nodes import TwoNodes, nodes_of
from contracts.placement import Placement
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec, read_spec
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.slots import ExpertPlacement

ROW_BYTES = 2  # of an element: bfloat16
PAIR_BYTES = 8  # its position and its weight


def predicted(placement: Placement, spec: ModelSpec, paths_PLK: Any) -> dict[str, float]:
    """Copies, load, and bytes of a token out and back, at all layers together."""
    slots, none = ExpertPlacement(placement), np.zeros(0, np.int64)
    found = [
        measure(
            LayerRouting(
                spec.num_experts,
                paths_PLK[:, position].astype(np.int64),
                none,
                TokenCounts(none, none, none),
            ),
            slots.layer(layer),
        )
        for position, layer in enumerate(spec.moe_layers)
    ]
    row_bytes = sum(each.copies for each in found) * spec.hidden_size * ROW_BYTES
    return {
        "copies": statistics.fmean(each.copies for each in found),
        "load": statistics.fmean(each.batch_load for each in found),
        "a2e_bytes": row_bytes + len(found) * spec.top_k * PAIR_BYTES,
        "e2a_bytes": row_bytes,
    }


async def compare(
    options: argparse.Namespace,
    rows: Sequence[list[int]],
    placements: dict[str, Placement],
    nodes: TwoNodes | None,
) -> dict[str, Any]:
    """Samples by placement, of rounds in which all of them ran the same batches; bytes of a token
    out and back."""
    batches = batches_of([len(row) for row in rows], options.batch_tokens)
    tokens = [sum(stop - start for start, stop in batch) for batch in batches]
    samples: dict[str, Any] = {}
    rounds: list[dict[str, Ran]] = []
    async with groups(options, placements, nodes) as running:
        await warm(running.values(), rows, tokens)
        for name, group in running.items():
            samples[name] = await _bytes(group, rows)
        for number in range(options.rounds):
            first = number % len(running)
            order = [*running][first:] + [*running][:first]
            found = {name: await ran(running[name], rows, tokens) for name in order}
            alike = {name: one for name, one in found.items() if one is not None}
            if len(alike) == len(running):
                rounds.append(alike)
    for name, of_name in samples.items():
        for field in Ran._fields:
            of_name[field] = [round(getattr(each[name], field), 4) for each in rounds]
    return samples


async def _bytes(group: Running, rows: Sequence[list[int]]) -> dict[str, float]:
    before = group.bytes_moved()
    await group.run(rows)
    out, back = np.subtract(group.bytes_moved(), before) / sum(map(len, rows))
    return {"a2e_bytes": round(float(out), 2), "e2a_bytes": round(float(back), 2)}


def summary_of(samples: dict[str, Any], foretold: dict[str, Any]) -> dict[str, Any]:
    base, rows = samples["contiguous"], {}
    whole = base["a2e_bytes"] + base["e2a_bytes"]
    for name, found in samples.items():
        said = foretold[name]
        moved = found["a2e_bytes"] + found["e2a_bytes"]
        rows[name] = {
            **said,
            "measured_a2e_bytes": found["a2e_bytes"],
            "measured_e2a_bytes": found["e2a_bytes"],
            "a2e_over_predicted": round(found["a2e_bytes"] / said["a2e_bytes"], 4),
            "e2a_over_predicted": round(found["e2a_bytes"] / said["e2a_bytes"], 4),
            "bytes_ratio": round(moved / whole, 4),
            "rounds": len(found["whole_s"]),
            "median_s": statistics.median(found["whole_s"]),
            "time_ratio": _ratio(found, base, "whole_s"),
            "cpu_ratio": _ratio(found, base, "attention_s", "experts_s"),
            "attention_cpu_ratio": _ratio(found, base, "attention_s"),
            "experts_cpu_ratio": _ratio(found, base, "experts_s"),
        }
        if moved < whole:
            fall = (1 - rows[name]["time_ratio"]) / (1 - moved / whole)
            rows[name]["fall_of_time_over_bytes"] = round(fall, 3)
    return rows


def _ratio(found: dict[str, Any], base: dict[str, Any], *fields: str) -> float:
    """Median over the rounds, of the sum of the fields."""

    def sums(samples: dict[str, Any]) -> Iterator[float]:
        return map(sum, zip(*(samples[field] for field in fields), strict=True))

    pairs = zip(sums(found), sums(base), strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 4)


def main() -> None:
    options = _options()
    nodes = nodes_of(options, "benchmarks.placed_bytes")
    spec = read_spec(BUNDLED)
    rows = _rows(options)
    paths_PLK = traced(AutoModelForCausalLM.from_pretrained(BUNDLED).float().eval(), rows).paths_PLK
    counts = RoutingCounts.read(BUNDLED / "routing.safetensors", BUNDLED, spec)
    samples, summary = {}, {}
    for ranks in options.ranks:
        placements = placements_of(spec, counts, ranks)
        if options.twin:
            placements["twin"] = placements["contiguous"]
        foretold = {name: predicted(each, spec, paths_PLK) for name, each in placements.items()}
        samples[f"1+{ranks}"] = asyncio.run(compare(options, rows, placements, nodes))
        summary[f"1+{ranks}"] = summary_of(samples[f"1+{ranks}"], foretold)
        print(json.dumps({f"1+{ranks}": summary[f"1+{ranks}"]}, indent=1), flush=True)
    where = "shm" if nodes is None else f"{options.mbit:g}mbit"
    settings = vars(options) | {"inside": None, "data": None, "output": None}
    result = Result(
        name=f"placed_bytes_{where}",
        kind="measured",
        settings={**settings, "tokens": sum(map(len, rows))},
        samples=samples,
        summary=summary,
    )
    print(f"written: {write_result(result, options.output)}")


def _rows(options: argparse.Namespace) -> list[list[int]]:
    """Test rows of all tasks in turns, so many tokens."""
    every = rows_of(options.data, "test", AutoTokenizer.from_pretrained(BUNDLED))
    order = np.random.default_rng(options.seed).permutation(len(every))
    rows: list[list[int]] = []
    while sum(map(len, rows)) < options.tokens:
        rows.append(every[order[len(rows)]])
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, help="rate of the link, of each direction")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--twin", action="store_true", help="a second group in order: the noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
