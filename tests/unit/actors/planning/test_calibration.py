"""The reference pass of a prefill worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from actors.planning.calibration import BUDGET_S, PROBE_TOKENS, calibrate
from actors.planning.link_probe import link_probe
from actors.planning.stage_probe import pool_tokens_for, stage_probe
from contracts.errors import ResourceError
from contracts.traces import Stage
from models.spec.model import read_spec


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


FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
RAGGED = [(0, 20), (16, 17), (32, 40)]  # a prompt, a decode step, a chunk behind a prefix
TinyCheckpoint = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_pass_times_every_stage_except_first_layer(
    family: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    folder = tiny_checkpoint(family)
    spec = read_spec(folder)
    with stage_probe(folder, spec, torch.float32, pool_tokens=pool_tokens_for(RAGGED)) as probe:
        times = probe.run(RAGGED, seed=0)
    layers = list(spec.moe_layers[1:])
    attention = [task.layer for task in times.attention if task.stage is Stage.ATTENTION]
    shared = [task.layer for task in times.attention if task.stage is Stage.SHARED]
    assert attention == layers
    assert shared == (layers if spec.num_shared_experts else [])
    assert [task.layer for task in times.expert] == layers
    assert all(task.seconds > 0 for task in times.attention)
    assert all(task.seconds > 0 for task in times.expert)


def test_pairs_are_divided_among_expert_ranks(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    pool = pool_tokens_for(RAGGED)
    with stage_probe(folder, spec, torch.float32, pool_tokens=pool, expert_ranks=4) as probe:
        times = probe.run(RAGGED, seed=0)
    assert 1 < times.copies <= spec.top_k
    for layer in spec.moe_layers[1:]:
        assert sum(task.pairs for task in times.expert if task.layer == layer) == 29 * spec.top_k


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_served_batch_has_time_outside_layers(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint(family)
    with stage_probe(folder, read_spec(folder), torch.float32, pool_tokens=512) as probe:
        for micro_batches in (1, 2):
            assert probe.serve([20, 7, 33], micro_batches=micro_batches, seed=1) > 0
        assert probe.run(RAGGED, seed=0).attention  # goes on as before


def test_model_larger_than_memory_is_rejected(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    with (
        pytest.raises(ResourceError, match="GiB are free"),
        stage_probe(folder, read_spec(folder), torch.float32, pool_tokens=1 << 40),
    ):
        pass


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_link_is_timed_in_both_directions(backend: str) -> None:
    with link_probe(backend) as probe:
        transfers = [probe.transfer(size) for size in (1, 4096, 1 << 20)]
    assert [transfer.num_bytes for transfer in transfers] == [1, 4096, 1 << 20]
    assert all(transfer.a2e_s > 0 and transfer.e2a_s > 0 for transfer in transfers)
