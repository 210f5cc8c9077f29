"""What the samples of benchmarks/gather_overlap.py amount to."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actors.model_shape import shape_of
from benchmarks.crossing import crossing
from benchmarks.prefill_pair import Pass
from models.spec import ModelSpec
from planner.request_work import flops_work
from planner.saturation import MARGIN_FRACTION, transfer_threshold_flops

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
    if "filling" in samples:
        summary["filling"] = {
            label: {policy: statistics.mean(found) for policy, found in by_policy.items()}
            for label, by_policy in samples["filling"].items()
        }
    return summary


def _overlap(samples: dict[str, list[list[Pass]]], tokens: int) -> dict[str, Any]:
    """Of each kind: tokens/s of a worker, median and range over rounds; the share of transfer time
    that is hidden; and its rate relative to resident, round by round."""
    rates = {
        mode: [tokens / statistics.mean(p.pass_s for p in passes) for passes in rounds]
        for mode, rounds in samples.items()
    }
    found: dict[str, Any] = {}
    for mode, rounds in samples.items():
        ratios = [
            mine / theirs for mine, theirs in zip(rates[mode], rates["resident"], strict=True)
        ]
        gather_s = sum(p.gather_s for passes in rounds for p in passes)
        wait_s = sum(p.wait_s for passes in rounds for p in passes)
        found[mode] = {
            "tokens_per_s": statistics.median(rates[mode]),
            "tokens_per_s_range": [min(rates[mode]), max(rates[mode])],
            "of_resident": statistics.median(ratios),
            "of_resident_range": [min(ratios), max(ratios)],
            "hidden_fraction": 1 - wait_s / gather_s if gather_s else None,
        }
    pairs = zip(rates["gathered"], rates["all_to_all"], strict=True)
    found["gathered_over_all_to_all"] = statistics.median(a / b for a, b in pairs)
    return found


def _threshold(
    samples: dict[str, dict[str, list[list[Pass]]]],
    spec: ModelSpec,
    row_flops: int,
    calibrated_flops: float,
) -> dict[str, Any]:
    """measured: the batch whose resident pass takes as long as passes do that wait for transfers,
    whatever their size. eq1, calibrated: without their margin."""
    table = {
        int(rows): {
            mode: statistics.median(p.pass_s for passes in rounds for p in passes)
            for mode, rounds in by_mode.items()
        }
        for rows, by_mode in samples.items()
    }
    exposed_s = [
        row["gathered"] for row in table.values() if row["gathered"] > _EXPOSED * row["resident"]
    ]
    floor_s = statistics.median(exposed_s) if exposed_s else float("nan")
    measured_rows = crossing(floor_s, [(rows, row["resident"]) for rows, row in table.items()])
    smallest, largest = min(table), max(table)
    # There is hardly any compute beside these transfers.
    alone = [p for rounds in samples[str(smallest)]["gathered"] for p in rounds if p.gathers]
    transfer_s = statistics.median(p.gather_s / p.gathers for p in alone)
    # Of the last layer only the rows whose logits are wanted are computed: one of each 512.
    computed = (spec.num_layers - 1) / spec.num_layers
    flops_per_s = computed * largest * row_flops / table[largest]["resident"]
    eq1_flops = transfer_threshold_flops(
        transfer_s=transfer_s,
        layers=len(spec.moe_layers),
        flops_per_s=flops_per_s,
        margin_fraction=0.0,
    )
    calibrated_rows = calibrated_flops / (1 + MARGIN_FRACTION) / row_flops
    eq1_rows = eq1_flops / row_flops
    return {
        "pass_s": {str(rows): row for rows, row in table.items()},
        "transfer_s": transfer_s,
        "flops_per_s": flops_per_s,
        "measured_tokens": measured_rows * ROW_TOKENS,
        "eq1_tokens": eq1_rows * ROW_TOKENS,
        "calibrated_tokens": calibrated_rows * ROW_TOKENS,
        "measured_over_eq1": measured_rows / eq1_rows,
        "measured_over_calibrated": measured_rows / calibrated_rows,
    }


def print_overlap(summary: dict[str, Any]) -> None:
    table = Table(title="Above the threshold, per worker")
    for heading in ("experts", "tokens/s", "range", "of resident", "transfers hidden"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    for mode, row in summary.items():
        if not isinstance(row, dict):
            continue
        hidden = row["hidden_fraction"]
        low, high = row["tokens_per_s_range"]
        table.add_row(
            mode,
            f"{row['tokens_per_s']:.0f}",
            f"{low:.0f} to {high:.0f}",
            f"{row['of_resident']:.3f}",
            "" if hidden is None else f"{hidden:.1%}",
        )
    Console(width=100).print(table)
    print(f"gathered over DP+EP: {summary['gathered_over_all_to_all']:.2f}")


def print_threshold(summary: dict[str, Any]) -> None:
    table = Table(title="Seconds of a pass")
    for heading in ("tokens", "resident", "gathered"):
        table.add_column(heading, justify="right")
    for rows, row in summary["pass_s"].items():
        table.add_row(
            str(int(rows) * ROW_TOKENS), f"{row['resident']:.3f}", f"{row['gathered']:.3f}"
        )
    Console(width=100).print(table)
    print(
        f"threshold in tokens: measured {summary['measured_tokens']:.0f}, Eq. 1 "
        f"{summary['eq1_tokens']:.0f}, calibrated {summary['calibrated_tokens']:.0f}"
    )


def print_filling(summary: dict[str, dict[str, float]]) -> None:
    table = Table(title="Below the threshold: mean turnaround, ms")
    for heading in ("requests", "never held", "always held", "chosen", "over the better"):
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for label, row in summary.items():
        better = min(row["never"], row["always"])
        cells = (f"{1e3 * row[policy]:.0f}" for policy in ("never", "always", "choose"))
        table.add_row(label, *cells, f"{row['choose'] / better:.3f}")
    Console(width=100).print(table)
