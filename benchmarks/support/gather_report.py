"""What the samples of benchmarks/cases/gather_overlap.py amount to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from actors.planning.planner_inputs import shape_of
from benchmarks.harness import Table
from benchmarks.support.prefill_pair import Round
from models.spec.model import ModelSpec
from planner.routing.request_work import flops_work
from planner.routing.saturation import MARGIN_FRACTION, transfer_threshold_flops

ROW_TOKENS = 512
_EXPOSED = 1.1  # of a resident pass: where transfers are clearly what a gathered one waits for


def summarise(samples: dict[str, Any], spec: ModelSpec, tokens: int) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    if "overlap" in samples:
        summary["overlap"] = _overlap(samples["overlap"], tokens)
    if "threshold" in samples:
        row_flops = flops_work(shape_of(spec, torch.float32))(0, ROW_TOKENS)
        calibrated = statistics.median(samples["calibrated"]["saturation_flops"])
        summary["threshold"] = _threshold(samples["threshold"], spec, row_flops, calibrated)
    return summary


def _overlap(samples: dict[str, list[Round]], tokens: int) -> dict[str, Any]:
    """Of each kind: tokens/s of a worker, median and range over rounds; its rate and its processor
    time per token relative to resident, round by round; the share of transfer time hidden."""
    resident = {found.number: found for found in samples["resident"]}
    summary: dict[str, Any] = {}
    for mode, rounds in samples.items():
        rates = [tokens / found.pass_s for found in rounds]
        beside = [(found, resident[found.number]) for found in rounds]
        of_resident = [theirs.pass_s / own.pass_s for own, theirs in beside]
        cpu = [_cpu_s(own) / _cpu_s(theirs) for own, theirs in beside]
        gather_s = sum(p.gather_s for found in rounds for p in found.passes)
        wait_s = sum(p.wait_s for found in rounds for p in found.passes)
        summary[mode] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_range": [min(rates), max(rates)],
            "of_resident": statistics.median(of_resident),
            "of_resident_quartiles": _quartiles(of_resident),
            "cpu_s_per_1000_tokens": statistics.median(1e3 * _cpu_s(found) for found in rounds),
            "cpu_of_resident": statistics.median(cpu),
            "cpu_of_resident_quartiles": _quartiles(cpu),
            "hidden_fraction": 1 - wait_s / gather_s if gather_s else None,
        }
    if "all_to_all" in samples:
        gathered = {found.number: found for found in samples["gathered"]}
        summary["gathered_over_all_to_all"] = statistics.median(
            found.pass_s / gathered[found.number].pass_s for found in samples["all_to_all"]
        )
    return summary


def _cpu_s(found: Round) -> float:
    """Per token."""
    return found.cpu_s / found.tokens


def _quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4)
    return [first, third]


def _threshold(
    samples: dict[str, dict[str, list[Round]]],
    spec: ModelSpec,
    row_flops: int,
    calibrated_flops: float,
) -> dict[str, Any]:
    """Medians over sweeps of what each says by itself: the machine's rate changes between them."""
    by_rows = {int(rows): by_mode for rows, by_mode in samples.items()}
    smallest = min(by_rows)
    calibrated_rows = calibrated_flops / (1 + MARGIN_FRACTION) / row_flops
    sweeps = []
    for number in range(len(by_rows[smallest]["gathered"])):
        table = {
            rows: {mode: rounds[number].pass_s for mode, rounds in by_mode.items()}
            for rows, by_mode in by_rows.items()
        }
        # There is hardly any compute beside the transfers of the smallest.
        alone = [p for p in by_rows[smallest]["gathered"][number].passes if p.gathers]
        transfer_s = statistics.mean(p.gather_s / p.gathers for p in alone)
        sweeps.append(_sweep(table, transfer_s, spec, row_flops))
    found = {name: statistics.median(sweep[name] for sweep in sweeps) for name in sweeps[0]}
    ratios = [sweep["measured_tokens"] / sweep["eq1_tokens"] for sweep in sweeps]
    return {
        "pass_s": {
            str(rows): {
                mode: statistics.median(found.pass_s for found in rounds)
                for mode, rounds in by_mode.items()
            }
            for rows, by_mode in by_rows.items()
        },
        **found,
        "calibrated_tokens": calibrated_rows * ROW_TOKENS,
        "measured_over_eq1": statistics.median(ratios),
        "measured_over_eq1_quartiles": _quartiles(ratios),
        "measured_over_calibrated": found["measured_tokens"] / (calibrated_rows * ROW_TOKENS),
    }


def _sweep(
    table: dict[int, dict[str, float]], transfer_s: float, spec: ModelSpec, row_flops: int
) -> dict[str, float]:
    """table: seconds of a pass by rows and kind. measured: the batch whose resident pass takes as
    long as passes do that wait for transfers, whatever their size. eq1: without its margin."""
    passes_s = [(row["resident"], row["gathered"]) for row in table.values()]
    exposed_s = [theirs for own, theirs in passes_s if theirs > _EXPOSED * own]
    floor_s = statistics.median(exposed_s) if exposed_s else float("nan")
    resident = statistics.linear_regression(list(table), [own for own, _ in passes_s])
    largest = max(table)
    # Of the last layer only the rows whose logits are wanted are computed: one of each 512.
    computed = (spec.num_layers - 1) / spec.num_layers
    pass_s = resident.intercept + resident.slope * largest
    flops_per_s = computed * largest * row_flops / pass_s
    eq1_flops = transfer_threshold_flops(
        transfer_s=transfer_s,
        layers=len(spec.moe_layers),
        flops_per_s=flops_per_s,
        margin_fraction=0.0,
    )
    return {
        "transfer_s": transfer_s,
        "flops_per_s": flops_per_s,
        "measured_tokens": (floor_s - resident.intercept) / resident.slope * ROW_TOKENS,
        "eq1_tokens": eq1_flops / row_flops * ROW_TOKENS,
    }


def tables(summary: dict[str, Any]) -> list[Table]:
    found = []
    if "overlap" in summary:
        rows = []
        for mode, row in summary["overlap"].items():
            if isinstance(row, dict):
                hidden = row["hidden_fraction"]
                ratios = [_with_quartiles(row, n) for n in ("of_resident", "cpu_of_resident")]
                shown = "" if hidden is None else f"{hidden:.1%}"
                rows.append([mode, f"{row['tokens_per_s']:.0f}", *ratios, shown])
        columns = ["experts", "tokens/s", "of resident", "CPU time of resident's", "hidden"]
        found.append(Table("Above the threshold, per worker", columns, rows))
    if "threshold" in summary:
        threshold = summary["threshold"]
        rows = [
            [str(int(n) * ROW_TOKENS), f"{row['resident']:.3f}", f"{row['gathered']:.3f}"]
            for n, row in threshold["pass_s"].items()
        ]
        found.append(Table("Seconds of a pass", ["tokens", "resident", "gathered"], rows))
        names = ("measured_tokens", "eq1_tokens", "calibrated_tokens", "measured_over_eq1")
        rows = [[name.replace("_", " "), f"{threshold[name]:,.4g}"] for name in names]
        found.append(Table("Threshold", ["", "value"], rows))
    return found


def _with_quartiles(row: dict[str, Any], name: str) -> str:
    first, third = row[f"{name}_quartiles"]
    return f"{row[name]:.3f} ({first:.3f} to {third:.3f})"
