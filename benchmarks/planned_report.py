"""The tables of benchmarks/planned_overlap.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.planned_points import PlanRun, PointRun

_COLUMNS = (
    "plan",
    "samples",
    "predicted ms",
    "measured ms",
    "p90",
    "error",
    "after refit",
    "to PPPipe",
    "to FinDEP",
    "exposed ms",
)


def print_report(runs: Sequence[PointRun]) -> None:
    console = Console(width=150)
    for run in runs:
        table = Table(title=run.point.label, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "plan" else "right")
        for name, plan in run.plans.items():
            table.add_row(*_row(run, name, plan))
        console.print(table)
        console.print(
            f"largest difference of a logit between two plans: {run.largest_difference:g} "
            f"(logits up to {run.largest_logit:.2f})"
        )
    summary = summary_of(runs)
    refit = summary["median_refit_error_fraction"]
    console.print(
        f"median error of predictions {summary['median_error_fraction']:.1%}"
        + (f", after refit {refit:.1%}" if refit is not None else "")
    )


def _row(run: PointRun, name: str, plan: PlanRun) -> list[str]:
    return [
        f"{name}: {plan.plan.label}",
        str(plan.samples),
        f"{plan.predicted_ms:.0f}",
        f"{plan.median_ms:.0f}",
        f"{_quantile(plan.measured_ms, 0.9):.0f}",
        f"{plan.error_fraction:+.1%}",
        "–" if plan.refit_error_fraction is None else f"{plan.refit_error_fraction:+.1%}",
        f"{statistics.median(speed_ratios(plan, run.plans['pppipe'])):.2f}",
        f"{statistics.median(speed_ratios(plan, run.plans['findep'])):.2f}",
        f"{statistics.median(plan.exposed_ms):.0f}",
    ]


def speed_ratios(plan: PlanRun, other: PlanRun) -> list[float]:
    """Samples per second, over the other plan's in the same round."""
    return [
        plan.samples / a / (other.samples / b)
        for a, b in zip(plan.measured_ms, other.measured_ms, strict=True)
    ]


def summary_of(runs: Sequence[PointRun]) -> dict[str, Any]:
    """Medians over all points and plans, and the table's figures."""
    plans = [plan for run in runs for plan in run.plans.values()]
    refits = [abs(p.refit_error_fraction) for p in plans if p.refit_error_fraction is not None]
    return {
        "median_error_fraction": statistics.median(abs(p.error_fraction) for p in plans),
        "median_refit_error_fraction": statistics.median(refits) if refits else None,
        "points": {
            run.point.label: {
                name: {
                    "plan": plan.plan.label,
                    "predicted_ms": plan.predicted_ms,
                    "measured_ms": plan.median_ms,
                    "measured_p90_ms": _quantile(plan.measured_ms, 0.9),
                    "error_fraction": plan.error_fraction,
                    "refit_error_fraction": plan.refit_error_fraction,
                    "speed_over_pppipe": statistics.median(speed_ratios(plan, run.plans["pppipe"])),
                    "speed_over_findep": statistics.median(speed_ratios(plan, run.plans["findep"])),
                    "exposed_ms": statistics.median(plan.exposed_ms),
                    "predicted_exposed_ms": plan.predicted_exposed_ms,
                }
                for name, plan in run.plans.items()
            }
            for run in runs
        },
    }


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]
