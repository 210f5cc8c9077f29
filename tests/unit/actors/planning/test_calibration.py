"""The reference pass of a prefill worker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from actors.planning.calibration import BUDGET_S, PROBE_TOKENS, calibrate, product_flops_per_s
from planner.routing.saturation import reference_prompts


class SimulatedLayers:
    """Layer times as `token_s` and a transfer have them; the first pass of a size is slow, and
    every other one may be disturbed in one layer. `seconds`: of all passes so far."""

    def __init__(self, token_s: float, transfer_s: float, *, disturbed: bool = False) -> None:
        self.token_s, self.transfer_s, self.layers = token_s, transfer_s, 4
        self.disturbed = disturbed
        self.seconds = 0.0
        self.sizes: list[int] = []

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        compute_s = sum(lengths) * self.token_s
        times = [compute_s] + [max(compute_s, self.transfer_s)] * (self.layers - 1)
        if sum(lengths) not in self.sizes:
            times = [3 * time for time in times]
        elif self.disturbed and len(self.sizes) % 2:
            times[2] *= 1.5
        self.sizes.append(sum(lengths))
        self.seconds += sum(times)
        return times


def test_times_exclude_disturbance_of_single_pass() -> None:
    layers = SimulatedLayers(token_s=1e-6, transfer_s=0.008, disturbed=True)
    calibration, _ = calibrate(layers, max_tokens=4096, context_tokens=2048)
    assert calibration.reference_prompts == (512,) * 8
    assert abs(calibration.first_layer_s - 4096e-6) < 1e-9
    assert abs(calibration.slowest_layer_s - 0.008) < 1e-9


@pytest.mark.parametrize(("transfer_s", "slowest_s"), [(1e-3, 4.096), (20.0, 20.0)])
def test_slow_worker_measures_small_batch_and_reports_largest(
    transfer_s: float, slowest_s: float
) -> None:
    layers = SimulatedLayers(token_s=1e-3, transfer_s=transfer_s)
    calibration, batches = calibrate(layers, max_tokens=4096, context_tokens=2048)
    assert PROBE_TOKENS <= max(layers.sizes) < 4096
    assert layers.seconds < 4 * BUDGET_S + 5 * 4 * 3 * transfer_s
    assert calibration.reference_prompts == (512,) * 8
    assert calibration.first_layer_s == pytest.approx(4.096)
    assert calibration.slowest_layer_s == pytest.approx(slowest_s)
    seconds = {sum(prompts): seconds for prompts, seconds in batches}
    assert seconds[4096] == pytest.approx(4.096 + 3 * slowest_s), "all layers, by the same rule"


def test_fast_device_measures_largest_batch() -> None:
    class WithAFloor(SimulatedLayers):
        def __call__(self, lengths: Sequence[int]) -> list[float]:
            return [max(1e-3, time) for time in super().__call__(lengths)]

    layers = WithAFloor(token_s=1e-7, transfer_s=0.01)
    calibration, _ = calibrate(layers, max_tokens=131_072, context_tokens=2048)
    assert max(layers.sizes) == 131_072
    assert calibration.first_layer_s == pytest.approx(131_072e-7)
    assert calibration.slowest_layer_s == pytest.approx(131_072e-7)


def test_smaller_batches_are_timed_within_budget() -> None:
    layers = SimulatedLayers(token_s=1e-6, transfer_s=1e-4)
    _, batches = calibrate(layers, max_tokens=4096, context_tokens=2048)
    seconds = {sum(prompts): seconds for prompts, seconds in batches}
    assert list(seconds) == [4096, 512, 64, 8]
    assert seconds[512] == pytest.approx(4 * 512e-6)
    assert seconds[64] == pytest.approx(64e-6 + 3 * 1e-4)
    copied = SimulatedLayers(token_s=1e-6, transfer_s=0.5)
    _, batches = calibrate(copied, max_tokens=4096, context_tokens=2048)
    assert len(batches) == 1, "a pass of any size would take as long as all of them may"


def test_frequent_disturbance_affects_all_sizes() -> None:
    layers = SimulatedLayers(token_s=1e-6, transfer_s=1e-6, disturbed=True)
    _, batches = calibrate(layers, max_tokens=4096, context_tokens=2048)
    for prompts, seconds in batches:
        assert seconds / sum(prompts) == pytest.approx(4e-6 * 1.0625, rel=0.03)


def test_batch_never_exceeds_the_requested_size() -> None:
    layers = SimulatedLayers(token_s=1e-7, transfer_s=1e-6)
    calibration, _ = calibrate(layers, max_tokens=40, context_tokens=16)
    assert calibration.reference_prompts == (16, 16, 8)
    assert max(layers.sizes) == 40


def test_reference_prompts_have_usual_length() -> None:
    assert reference_prompts(4096, 8192) == (512,) * 8
    assert reference_prompts(1000, 8192) == (512, 488)
    assert reference_prompts(100, 8192) == (100,)


def test_product_rate_is_of_fastest_round() -> None:
    times = iter([0.0, 4.0, 10.0, 11.0, 20.0, 22.0, 30.0, 33.0])
    rate = product_flops_per_s(torch.float32, torch.device("cpu"), lambda: next(times))
    assert rate == 2.0 * 768**3
