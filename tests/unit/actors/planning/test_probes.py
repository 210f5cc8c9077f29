"""The probes with real halves, a real channel and a real child process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.planning.link_probe import link_probe
from actors.planning.stage_probe import first_layers, pool_tokens_for, stage_probe
from contracts.errors import ResourceError
from contracts.traces import Stage
from models.spec.model import read_spec

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


def test_pass_reaches_all_experts_of_tokens(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    with stage_probe(folder, spec, torch.float32, pool_tokens=pool_tokens_for(RAGGED)) as probe:
        tasks = probe.run(RAGGED, seed=0).expert
    assert {task.pairs for task in tasks} == {29 * spec.top_k}
    assert all(spec.top_k <= task.active <= spec.num_experts for task in tasks)


def test_pairs_are_divided_among_expert_ranks(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
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


def test_few_layers_represent_all(tiny_checkpoint: TinyCheckpoint) -> None:
    spec = read_spec(tiny_checkpoint("gpt_oss", num_hidden_layers=12))
    cut = first_layers(spec)
    assert cut.num_layers < spec.num_layers
    assert set(cut.sliding_windows[1:]) == set(spec.sliding_windows)


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
