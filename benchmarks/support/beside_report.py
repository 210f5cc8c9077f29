"""Tables and result file of `benchmarks.cases.beside_transformers`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Table
from benchmarks.support.model_work import Pass, Rates
from benchmarks.support.time_shares import ROWS, Shares, total

SIDES = ("tandem", "transformers")


def summary_of(
    rates: Sequence[dict[str, float]], ranks: Sequence[dict[str, Shares]]
) -> dict[str, Any]:
    """Medians and ratios of one phase, and each rank's shares of all runs together."""
    medians = {side: statistics.median(row[side] for row in rates) for side in SIDES}
    ratios = sorted(row["tandem"] / row["transformers"] for row in rates)
    return {
        "tokens_per_s": medians,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "shares": {name: _fractions([row[name] for row in ranks]) for name in ranks[0]},
    }


def gemm_fraction(passes: Sequence[Pass], tokens: int, tokens_per_s: float, rates: Rates) -> float:
    """Of the rate that all cores have in matrix products, what a phase reaches."""
    flops_per_token = sum(each.flops for each in passes) / tokens
    return flops_per_token * tokens_per_s / (rates.flops_per_s * (os.cpu_count() or 1))


def tables(summary: dict[str, Any]) -> list[Table]:
    return [_speed(summary), _shares(summary)]


def _fractions(parts: Sequence[Shares]) -> dict[str, float]:
    whole = total(parts)
    return {
        field.removesuffix("_s") + "_fraction": getattr(whole, field) / whole.wall_s
        for field in ROWS
    }


def _speed(summary: dict[str, Any]) -> Table:
    rows = []
    for phase, row in summary["phases"].items():
        medians, ratios = row["tokens_per_s"], row["ratios"]
        rows.append(
            [
                phase,
                f"{medians['tandem']:.0f} ({row['plan']})",
                f"{medians['transformers']:.0f} ({row['implementation']})",
                f"{row['ratio_median']:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})",
                f"{row['gemm_rate_fraction']:.0%}",
            ]
        )
    columns = ["phase", "tandem", "transformers", "ratio (worst, best)", "of GEMM rate"]
    return Table("Tokens/s, medians", columns, rows)


def _shares(summary: dict[str, Any]) -> Table:
    columns = [(phase, rank) for phase, row in summary["phases"].items() for rank in row["shares"]]
    rows = []
    for field, label in ROWS.items():
        key = field.removesuffix("_s") + "_fraction"
        cells = [summary["phases"][phase]["shares"][rank][key] for phase, rank in columns]
        rows.append([label, *(f"{100 * cell:.1f}" for cell in cells)])
    heads = [f"{phase}, {rank}" for phase, rank in columns]
    return Table("Time of a rank, % of the wall time", ["", *heads], rows)
