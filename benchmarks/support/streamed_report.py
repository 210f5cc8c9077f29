"""What the samples of benchmarks/cases/streamed_on_gpu.py amount to."""

import statistics
from typing import Any

import torch

from actors.planning.planner_inputs import shape_of
from benchmarks.support.crossing import crossing
from models.spec.model import ModelSpec
from planner.routing.open_requests import flops_work
from tests.support.paper_routing import transfer_threshold_flops

_EXPOSED = 1.1  # of a resident pass: where copies are clearly what a streamed one waits for
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
        "threshold": _threshold(points, samples, facts, spec, row_flops / row_tokens),
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


def _threshold(
    points: dict[int, dict[str, Any]],
    samples: Samples,
    facts: dict[str, Any],
    spec: ModelSpec,
    token_flops: float,
) -> dict[str, Any]:
    """In tokens. measured: the batch whose resident pass takes as long as streamed passes do that
    wait for copies, whatever their size. eq1: L * T_x * P, with P at the largest batch."""
    exposed_s = [
        point["streamed"]["pass_s"]
        for point in points.values()
        if point["streamed"]["pass_s"] > _EXPOSED * point["resident"]["pass_s"]
    ]
    largest, copies = max(points), len(spec.moe_layers) - 1
    turns = [turn for by in samples.values() for turn in by["streamed"]]
    passes = sum(len(turn["pass_s"]) for turn in turns)
    transfer_s = sum(turn["copied_s"] for turn in turns) / max(1, passes * copies)
    computed = (spec.num_layers - 1) / spec.num_layers  # of the last layer hardly anything is
    flops_per_s = computed * largest * token_flops / points[largest]["resident"]["pass_s"]
    eq1_flops = transfer_threshold_flops(
        transfer_s=transfer_s,
        layers=len(spec.moe_layers),
        flops_per_s=flops_per_s,
        margin_fraction=0.0,
    )
    curve = [(tokens, point["resident"]["pass_s"]) for tokens, point in points.items()]
    measured = (
        crossing(statistics.median(exposed_s), curve) if exposed_s and len(curve) > 1 else None
    )
    reached = [tokens for tokens, point in points.items() if point["of_resident"] >= _GOAL]
    return {
        "transfer_s": transfer_s,
        "measured_tokens": measured,
        "eq1_tokens": eq1_flops / token_flops,
        "measured_over_eq1": None if measured is None else measured * token_flops / eq1_flops,
        "calibrated_tokens": facts["calibrated_flops"] / token_flops,
        "smallest_at_goal_tokens": min(reached, default=None),
    }
