"""The reference pass of a prefill worker: how long its layers take (MoE-Prefill, Appendix B.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from contracts.clock import Clock
from contracts.routing import Calibration
from kernels.device import finish
from kernels.linear import Linear
from planner.routing.saturation import reference_prompts

BUDGET_S = 2.0  # of all passes together, roughly
PROBE_TOKENS = 128
_PASSES = 3
_WORTHWHILE = 2.0  # a larger reference batch, else the one that was timed will do
_PRODUCT, _GPU_PRODUCT, _ROUNDS = 768, 8192, 4

TimeLayers = Callable[[Sequence[int]], list[float]]
"""Runs prompts of these lengths; wall seconds of each layer that has experts."""


def calibrate(time_layers: TimeLayers, *, max_tokens: int, context_tokens: int) -> Calibration:
    """Times of the largest batch that a worker runs. Where that would take too long, those of a
    smaller one, with the compute scaled up: transfers take as long for any batch.

    The first pass of a size compiles its products, and is left out. Of the others the fastest time
    of each layer counts, so that other work on the machine does not. A GPU takes hardly longer for
    some thousand tokens than for one: there sizes grow until the time does.
    """
    tokens = min(max_tokens, PROBE_TOKENS)
    while True:
        lengths = reference_prompts(tokens, context_tokens)
        time_layers(lengths)
        passes = [time_layers(lengths)]
        affordable = tokens * BUDGET_S / (_PASSES * len(passes[0]) * passes[0][0])
        larger = min(max_tokens, int(affordable))
        if larger < _WORTHWHILE * tokens and (larger < max_tokens or tokens == max_tokens):
            break
        tokens = larger
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


def product_flops_per_s(
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    *,
    rounds: int = _ROUNDS,
    products: int = 1,
) -> float:
    """FLOPs per second of a large product of matrices: what a model's can be held against. The best
    of `rounds`, each of so many products in a row."""
    size = _PRODUCT if device.type == "cpu" else _GPU_PRODUCT
    # Random: a GPU takes less power for ones, and so less time.
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = Linear(weight)
    best_s = float("inf")
    for _ in range(rounds):
        finish(device)
        start_s = clock()
        for _ in range(products):
            product(x)
        finish(device)
        best_s = min(best_s, clock() - start_s)
    return 2.0 * size**3 * products / best_s
