"""Tables and result file of `benchmarks.beside_transformers`."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import record
from benchmarks.model_work import Pass, Rates
from benchmarks.time_shares import ROWS, Shares, total

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


def report(
    summary: dict[str, Any],
    samples: dict[str, Any],
    options: argparse.Namespace,
    model: dict[str, Any],
) -> None:
    """Prints both tables and writes the result."""
    console = Console(width=110)
    console.print(_speed(summary, options))
    console.print(_shares(summary))
    name = f"beside_transformers_{options.model.replace('-', '_')}_{options.dtype}"
    record(name, options, samples, summary, model)


def _fractions(parts: Sequence[Shares]) -> dict[str, float]:
    whole = total(parts)
    return {
        field.removesuffix("_s") + "_fraction": getattr(whole, field) / whole.wall_s
        for field in ROWS
    }


def _speed(summary: dict[str, Any], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.model}, {options.dtype}: tokens/s, medians")
    for heading in ("phase", "tandem", "transformers", "ratio (worst, best)", "of GEMM rate"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase, row in summary["phases"].items():
        medians, ratios = row["tokens_per_s"], row["ratios"]
        table.add_row(
            phase,
            f"{medians['tandem']:.0f}  [{row['plan']}]".replace("[", "\\["),
            f"{medians['transformers']:.0f}  ({row['implementation']})",
            f"{row['ratio_median']:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})",
            f"{row['gemm_rate_fraction']:.0%}",
        )
    return table


def _shares(summary: dict[str, Any]) -> Table:
    table = Table(title="Where the time of a rank went, % of the wall time")
    table.add_column("")
    columns = [(phase, rank) for phase, row in summary["phases"].items() for rank in row["shares"]]
    for phase, rank in columns:
        table.add_column(f"{phase}\n{rank}", justify="right")
    for field, label in ROWS.items():
        key = field.removesuffix("_s") + "_fraction"
        cells = [summary["phases"][phase]["shares"][rank][key] for phase, rank in columns]
        table.add_row(label, *(f"{100 * cell:.1f}" for cell in cells))
    return table
