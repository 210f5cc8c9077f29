"""What holding batches below the threshold costs, measured, and beside it simulated."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.filling_runs import LAYERS, MAX_WAIT_S, POINTS, arrivals
from benchmarks.simulated_filling import Arrivals, over_the_better
from planner.filling import FillLimits, PassTimes

# Of the measured passes over one and over four requests: 0.15 s and 0.2 s. Flops in requests.
TIMES = PassTimes(layers=LAYERS, resident=1, transfer_s=0.046, flops_per_s=1 / 0.055)
LARGEST_REQUESTS = 16  # a batch of 2,048 tokens
JITTER = 0.1
SIMULATED_RUNS = 100


def summarise_filling(samples: dict[str, dict[str, list[list[float]]]]) -> dict[str, Any]:
    """By point: mean turnarounds in seconds; the choice over the better policy and never over never
    again, of all requests together and as the range of blocks' ratios; the same, simulated."""
    found: dict[str, Any] = {}
    for (rate_per_s, at_once), (label, blocks) in zip(POINTS, samples.items(), strict=True):
        means = {run: statistics.mean(itertools.chain(*parts)) for run, parts in blocks.items()}
        better = min("never", "always", key=means.__getitem__)
        requests = sum(map(len, blocks["never"]))
        found[label] = {
            "means_s": means,
            "chosen": means["choose"] / means[better],
            "chosen_blocks": _ratios(blocks["choose"], blocks[better]),
            "again": means["again"] / means["never"],
            "again_blocks": _ratios(blocks["again"], blocks["never"]),
            "simulated": simulated(rate_per_s, at_once, requests),
        }
    return found


def simulated(rate_per_s: float, at_once: int, requests: int) -> dict[str, dict[str, float]]:
    """Passes that take exactly their time, and passes that vary by a tenth."""

    def arrivals_of(seed: int) -> Arrivals:
        return [(at_s, 1.0) for at_s in arrivals(rate_per_s, at_once, requests, seed=seed)]

    limits = FillLimits(max_wait_s=MAX_WAIT_S, max_flops=LARGEST_REQUESTS)
    return {
        name: over_the_better(arrivals_of, limits, TIMES, jitter=jitter, runs=SIMULATED_RUNS)
        for name, jitter in (("exact", 0.0), ("varied", JITTER))
    }


def print_filling(summary: dict[str, Any]) -> None:
    table = Table(title="Below the threshold: mean turnaround, ms")
    for heading in ("requests", "never held", "always held", "chosen", "over the better (blocks)",
                    "never again over never (blocks)"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for label, row in summary.items():
        cells = (f"{1e3 * row['means_s'][run]:.0f}" for run in ("never", "always", "choose"))
        ratios = (f"{row[key]:.3f} ({_range(row[f'{key}_blocks'])})" for key in ("chosen", "again"))
        table.add_row(label, *cells, *ratios)
    Console(width=120).print(table)
    table = Table(title="The same, simulated: medians (10th to 90th percentile) of 100 runs")
    for heading in ("requests", "exact passes: chosen", "varied: chosen", "varied: never again"):
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for label, row in summary.items():
        exact, varied = row["simulated"]["exact"], row["simulated"]["varied"]
        chosen = (f"{found['chosen_p50']:.3f} (to {found['chosen_p90']:.3f})"
                  for found in (exact, varied))  # fmt: skip
        table.add_row(label, *chosen, f"{varied['again_p10']:.3f} to {varied['again_p90']:.3f}")
    Console(width=120).print(table)


def _ratios(blocks: list[list[float]], others: list[list[float]]) -> list[float]:
    pairs = zip(blocks, others, strict=True)
    return sorted(statistics.mean(block) / statistics.mean(other) for block, other in pairs)


def _range(ratios: list[float]) -> str:
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
