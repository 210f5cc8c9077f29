"""The warm-up batch of an attention rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.ranks.rank import Rank
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    ThreadGroup,
    group_config,
    prefill_config,
)

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(("pool_tokens", "has_own"), [(16 * 512, True), (32, False)])
def test_first_batch_is_warm_up_if_it_fits(
    tiny_checkpoint: Checkpoints, pool_tokens: int, has_own: bool
) -> None:
    config = group_config(kv={"pool_tokens": pool_tokens})
    with ThreadGroup(tiny_checkpoint("qwen3_moe"), config) as group, group.client() as client:
        client.scored(client.submit([1, 2, 3], candidates=[0]))
        batches = sum(group.attention[0].status().sections["plans"].values())
        assert (batches > 1) is has_own  # our request is one batch at most


@pytest.fixture
def damaged(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """Return a checkpoint whose final norm is NaN."""
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "damaged"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, file, {"format": "pt"})
    return folder


def assert_names_checkpoint(worker: Rank, client: RankConnection, folder: Path) -> None:
    failed = client.failed(client.submit([1, 2, 3], candidates=[0]))
    for message in (failed.message, worker.status().reason):
        assert str(folder) in message
        assert "not finite" in message
        assert "model.dtype" in message
    assert not worker.status().healthy


def test_attention_rank_with_nonfinite_warm_up_names_its_checkpoint(
    damaged: Path,
) -> None:
    with ThreadGroup(damaged, group_config()) as group, group.client() as client:
        client.read_until(lambda: client.state is not None and not client.state.healthy)
        assert_names_checkpoint(group.attention[0], client, damaged)


def test_prefill_worker_with_nonfinite_reference_pass_names_its_checkpoint(
    damaged: Path,
) -> None:
    config = prefill_config(prefill={"saturation": None})
    with PrefillThreads(damaged, config) as workers, workers.client() as client:
        client.read_until(lambda: client.state is not None and not client.state.healthy)
        assert_names_checkpoint(workers.workers[0], client, damaged)
