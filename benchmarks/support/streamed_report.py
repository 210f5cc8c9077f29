"""What the samples of benchmarks/cases/streamed_on_gpu.py amount to."""

import statistics
from typing import Any

import torch

from actors.planning.planner_inputs import shape_of
from models.spec.model import ModelSpec
from planner.routing.open_requests import flops_work

_GOAL = 0.95  # of resident throughput

Samples = dict[str, dict[str, list[dict[str, Any]]]]


def summarise(
    samples: Samples, facts: dict[str, Any], spec: ModelSpec, dtype: torch.dtype, row_tokens: int
) -> dict[str, Any]:
    """facts: calibrated_flops, layer_bytes, gemm_flops_per_s, copy_bytes_per_s."""
    done_flops = executed_flops(spec, dtype, row_tokens)
    points = {
        int(tokens): _point(by_variant, done_flops * int(tokens), facts["gemm_flops_per_s"])
        for tokens, by_variant in samples.items()
    }
    row_flops = flops_work(shape_of(spec, dtype.itemsize))(0, row_tokens)
    reached = [tokens for tokens, point in points.items() if point["of_resident"] >= _GOAL]
    copied_layers = len(spec.moe_layers) - 1
    on_device = min(2, copied_layers) + 1
    all_bytes = facts["layer_bytes"] * (len(spec.moe_layers) - on_device)
    peaks = {
        name: max(turn["peak_bytes"] for by in samples.values() for turn in by[name])
        for name in ("resident", "streamed")
    }
    return {
        **facts,
        "experts_on_device_fraction": on_device / len(spec.moe_layers),
        "peak_bytes": {**peaks, "streamed_alone": max(0, peaks["streamed"] - all_bytes)},
        "points": {str(tokens): point for tokens, point in points.items()},
        "threshold": {
            "calibrated_tokens": facts["calibrated_flops"] * row_tokens / row_flops,
            "smallest_at_goal_tokens": min(reached, default=None),
        },
    }


def executed_flops(spec: ModelSpec, dtype: torch.dtype, row_tokens: int) -> float:
    """FLOPs per token of rows of which one position is asked for: of the last layer keys and values
    alone, and the head of that position."""
    layers = flops_work(shape_of(spec, dtype.itemsize))(0, row_tokens) / row_tokens
    key_values = 4.0 * spec.hidden_size * spec.num_kv_heads * spec.head_dim
    head = 2.0 * spec.hidden_size * spec.vocab_size / row_tokens
    return layers * (spec.num_layers - 1) / spec.num_layers + key_values + head


def _point(
    by_variant: dict[str, list[dict[str, Any]]], done_flops: float, gemm_flops_per_s: float
) -> dict[str, Any]:
    """Medians over turns; ratios turn by turn."""
    mean_s = {
        name: [statistics.mean(turn["pass_s"]) for turn in turns]
        for name, turns in by_variant.items()
    }
    ratios = [
        resident / streamed
        for resident, streamed in zip(mean_s["resident"], mean_s["streamed"], strict=True)
    ]
    found: dict[str, Any] = {
        "of_resident": statistics.median(ratios),
        "of_resident_range": [min(ratios), max(ratios)],
    }
    for name, times in mean_s.items():
        pass_s = statistics.median(times)
        found[name] = {
            "pass_s": pass_s,
            "tokens_per_s": by_variant[name][0]["tokens"] / pass_s,
            "flops_utilization": done_flops / pass_s / gemm_flops_per_s,
        }
    copied_s = sum(turn["copied_s"] for turn in by_variant["streamed"])
    waited_s = sum(turn["waited_s"] for turn in by_variant["streamed"])
    found["hidden_fraction"] = 1 - waited_s / copied_s if copied_s else None
    return found
