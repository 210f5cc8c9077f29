"""The tables of benchmarks/cases/planned_overlap.py."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Table
from benchmarks.support.planned_points import PlanRun, PointRun

SCHEDULES = ("pppipe", "findep", "beyond")


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for label, plans in summary["points"].items():
        shown = [plans[name] for name in SCHEDULES]
        speeds = [f"{plan['speed_over_pppipe']:.2f}" for plan in shown[1:]]
        largest = max(abs(plan["error_fraction"]) for plan in plans.values())
        times = [f"{plan['measured_ms']:.0f}" for plan in shown]
        rows.append([label, *times, *speeds, f"{largest:.1%}"])
    columns = [f"{name} ms" for name in SCHEDULES]
    speeds = [f"{name} over pppipe" for name in SCHEDULES[1:]]
    median = f"median error of the prediction {summary['median_error_fraction']:.1%}"
    return [Table(f"Measured; {median}", ["point", *columns, *speeds, "largest error"], rows)]


def speed_ratios(plan: PlanRun, other: PlanRun) -> list[float]:
    """Samples per second, over the other plan's in the same round."""
    return [
        plan.samples / a / (other.samples / b)
        for a, b in zip(plan.measured_ms, other.measured_ms, strict=True)
    ]


def summary_of(runs: Sequence[PointRun]) -> dict[str, Any]:
    """Medians over all points and plans, and the table's figures."""
    plans = [plan for run in runs for plan in run.plans.values()]
    return {
        "median_error_fraction": statistics.median(abs(p.error_fraction) for p in plans),
        "points": {
            run.point.label: {
                name: {
                    "plan": plan.plan.label,
                    "predicted_ms": plan.predicted_ms,
                    "measured_ms": plan.median_ms,
                    "measured_p90_ms": _quantile(plan.measured_ms, 0.9),
                    "error_fraction": plan.error_fraction,
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
