"""The reference pass of a prefill worker: durations of its layers (MoE-Prefill, Appendix B.4)."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from contracts.clock import Clock
from contracts.routing_messages import Calibration
from kernels.device import wait_for_device
from kernels.linear import PackedLinear
from planner.routing.worker_state import reference_prompts

BUDGET_S = 2.0  # for all passes together, approximately
PROBE_TOKENS = 128
MIN_TOKENS = 8  # of the smallest timed batch
_PASSES, _MAX_PASSES = 3, 8
_SHRINK_FACTOR = 8  # between consecutive smaller batches
_MIN_GROWTH = 2.0  # below this, the batch already timed is large enough
_PRODUCT, _GPU_PRODUCT, _ROUNDS = 768, 8192, 4

TimeLayers = Callable[[Sequence[int]], list[float]]
"""Runs prompts of these lengths; wall seconds of each layer that has experts."""


class TimedBatch(NamedTuple):
    """prompts: tokens of each, none cached. seconds: mean over passes, all layers."""

    prompts: tuple[int, ...]
    seconds: float


class Reference(NamedTuple):
    """batches: the one used for calibration, and smaller ones as far as time allowed."""

    calibration: Calibration
    batches: tuple[TimedBatch, ...]


def calibrate(time_layers: TimeLayers, *, max_tokens: int, context_tokens: int) -> Reference:
    """Time the largest batch of a worker, or an affordable one with its compute scaled up.

    Transfers take as long for any batch. The threshold uses the fastest time of each layer, which
    excludes other work on the machine; batches are compared by their means.
    """
    lengths, passes = _find_largest(time_layers, max_tokens, context_tokens)
    timed = [TimedBatch(lengths, statistics.fmean(map(sum, passes)))]
    timed += _time_smaller(time_layers, timed[0], context_tokens)
    best_l = [min(times) for times in zip(*passes, strict=True)]
    tokens = sum(lengths)
    if tokens < max_tokens:
        compute_s = best_l[0] * max_tokens / tokens
        lengths = reference_prompts(max_tokens, context_tokens)
        best_l = [max(compute_s, layer_s) for layer_s in best_l]
        timed.append(TimedBatch(lengths, sum(best_l)))
    calibration = Calibration(
        first_layer_s=best_l[0], slowest_layer_s=max(best_l), reference_prompts=lengths
    )
    return Reference(calibration, tuple(timed))


def _find_largest(
    time_layers: TimeLayers, max_tokens: int, context_tokens: int
) -> tuple[tuple[int, ...], list[list[float]]]:
    """Return the prompts of the largest affordable batch and its layer times in each pass.

    The first pass of each size compiles its products and is left out. A GPU takes hardly longer for
    a thousand tokens than for one, so sizes grow until the time does.
    """
    tokens = min(max_tokens, PROBE_TOKENS)
    while True:
        lengths = reference_prompts(tokens, context_tokens)
        time_layers(lengths)
        passes = [time_layers(lengths)]
        affordable = tokens * BUDGET_S / (_PASSES * len(passes[0]) * passes[0][0])
        larger = min(max_tokens, int(affordable))
        if larger < _MIN_GROWTH * tokens and (larger < max_tokens or tokens == max_tokens):
            break
        tokens = larger
    if sum(passes[0]) < BUDGET_S:
        passes.append(time_layers(lengths))
    return lengths, passes


def _time_smaller(
    time_layers: TimeLayers, largest: TimedBatch, context_tokens: int
) -> list[TimedBatch]:
    """Time ever smaller batches while the budget lasts."""
    found: list[TimedBatch] = []
    tokens, last_s, left_s = sum(largest.prompts) // _SHRINK_FACTOR, largest.seconds, BUDGET_S
    while tokens >= MIN_TOKENS and _PASSES * last_s <= left_s:
        lengths = reference_prompts(tokens, context_tokens)
        left_s -= sum(time_layers(lengths))
        times: list[float] = []
        while len(times) < _PASSES - 1 or (
            len(times) < _MAX_PASSES and sum(times) < largest.seconds / _SHRINK_FACTOR
        ):
            times.append(sum(time_layers(lengths)))
        last_s = statistics.fmean(times)
        left_s -= sum(times)
        found.append(TimedBatch(lengths, last_s))
        tokens //= _SHRINK_FACTOR
    return found


def product_flops_per_s(
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    *,
    rounds: int = _ROUNDS,
    products: int = 1,
) -> float:
    """Return the FLOPs per second of a large matrix product, the reference for a model's.

    The best of `rounds`, each of `products` products.
    """
    size = _PRODUCT if device.type == "cpu" else _GPU_PRODUCT
    # Random values: constants would take a GPU less power, and so less time.
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = PackedLinear(weight)
    best_s = float("inf")
    for _ in range(rounds):
        wait_for_device(device)
        start_s = clock()
        for _ in range(products):
            product(x)
        wait_for_device(device)
        best_s = min(best_s, clock() - start_s)
    return 2.0 * size**3 * products / best_s
