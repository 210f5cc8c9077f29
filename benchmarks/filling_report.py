"""What holding batches below the threshold costs, measured, and beside it simulated."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.filling_runs import LAYERS, MAX_WAIT_S, POINTS, arrivals
from benchmarks.simulated_filling import Arrivals, over_the_better
from planner.policies.filling import FillLimits, PassTimes

# Of the measured passes over one and over four requests: 0.15 s and 0.2 s. Flops in requests.
TIMES = PassTimes(layers=LAYERS, resident=1, transfer_s=0.046, flops_per_s=1 / 0.055)
LARGEST_REQUESTS = 16  # a batch of 2,048 tokens
JITTER = 0.1
SIMULATED_RUNS = 100


def summarise_filling(samples: dict[str, dict[str, list[list[float]]]]) -> dict[str, Any]:
    """By point: a block's mean turnaround in seconds, of the median block, and of all requests; the
    choice over the policy that is better in its median block, and never again over never, as
    quartiles of the ratios within a block; the same, simulated.

    Medians, since a machine that stands still for seconds does so for one policy of one block.
    """
    found: dict[str, Any] = {}
    for (rate_per_s, at_once), (label, blocks) in zip(POINTS, samples.items(), strict=True):
        means = {run: [statistics.mean(block) for block in parts] for run, parts in blocks.items()}
        medians = {run: statistics.median(parts) for run, parts in means.items()}
        better = min("never", "always", key=medians.__getitem__)
        requests = sum(map(len, blocks["never"]))
        found[label] = {
            "block_medians_s": medians,
            "means_s": {run: statistics.mean(parts) for run, parts in means.items()},
            "chosen_quartiles": _quartiles(means["choose"], means[better]),
            "again_quartiles": _quartiles(means["again"], means["never"]),
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
    table = Table(title="Below the threshold: mean turnaround of the median block, ms")
    for heading in ("requests", "never held", "always held", "chosen", "over the better",
                    "never again over never"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for label, row in summary.items():
        medians_s = row["block_medians_s"]
        cells = (f"{1e3 * medians_s[run]:.0f}" for run in ("never", "always", "choose"))
        ratios = (_shown(row[f"{key}_quartiles"]) for key in ("chosen", "again"))
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


def _quartiles(means_s: list[float], others_s: list[float]) -> list[float]:
    """Of the blocks' ratios."""
    ratios = [mean / other for mean, other in zip(means_s, others_s, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def _shown(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.3f} ({low:.2f} to {high:.2f})"
