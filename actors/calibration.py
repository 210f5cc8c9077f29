"""The reference pass of a prefill worker: how long its layers take (MoE-Prefill, Appendix B.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from contracts.clock import Clock
from contracts.routing import Calibration
from kernels.linear import Linear
from planner.saturation import reference_prompts

BUDGET_S = 2.0  # of all passes together, roughly
PROBE_TOKENS = 128
_PASSES = 3
_PRODUCT, _ROUNDS = 768, 4

TimeLayers = Callable[[Sequence[int]], list[float]]
"""Runs prompts of these lengths; wall seconds of each layer that has experts."""


def calibrate(time_layers: TimeLayers, *, max_tokens: int, context_tokens: int) -> Calibration:
    """Times of the largest batch that a worker runs. Where that would take too long, those of a
    smaller one, with the compute scaled up: transfers take as long for any batch.

    The first pass of a size compiles its products, and is left out. Of the others the fastest time
    of each layer counts, so that other work on the machine does not.
    """
    probe = reference_prompts(min(max_tokens, PROBE_TOKENS), context_tokens)
    time_layers(probe)
    times_l = time_layers(probe)
    affordable = sum(probe) * BUDGET_S / (_PASSES * len(times_l) * times_l[0])
    tokens = max(sum(probe), min(max_tokens, int(affordable)))
    lengths = reference_prompts(tokens, context_tokens)
    time_layers(lengths)
    passes = [time_layers(lengths)]
    if sum(passes[0]) < BUDGET_S:
        passes.append(time_layers(lengths))
    best_l = [min(times) for times in zip(*passes, strict=True)]
    if tokens == max_tokens:
        return Calibration(
            first_layer_s=best_l[0], slowest_layer_s=max(best_l), reference_prompts=lengths
        )
    compute_s = best_l[0] * max_tokens / tokens
    return Calibration(
        first_layer_s=compute_s,
        slowest_layer_s=max(compute_s, *best_l),
        reference_prompts=reference_prompts(max_tokens, context_tokens),
    )


def product_flops_per_s(dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    """FLOPs per second of a large product of matrices: what a model's can be held against."""
    x = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype, device=device)
    product = Linear(torch.ones_like(x))
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start_s = clock()
        product(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, clock() - start_s)
    return 2.0 * _PRODUCT**3 / best_s
