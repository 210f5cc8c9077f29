"""Errors of one sequence, which affect neither its batch nor its rank."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.ranks.rank import Rank
from contracts.messages import Failed
from contracts.requests import Sampling
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    ThreadGroup,
    greedy,
    group_config,
    half_of,
    loop_of,
    meeting,
    prefill_config,
    rank_of,
)

pytestmark = pytest.mark.long

Checkpoints = Callable[..., Path]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [14, 15, 16]]


@pytest.fixture(scope="module", params=["attention", "prefill"])
def rank(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints
) -> Iterator[tuple[Rank, RankConnection]]:
    """Return a rank of either kind and its client."""
    with rank_of(request.param, tiny_checkpoint("qwen3_moe")) as (worker, client):
        client.generated(client.submit([1, 2], sampling=greedy(1)))  # the rank's own has run
        yield worker, client


@contextmanager
def logits_spoiled(worker: Rank, spoil: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Apply `spoil` to all logits [R, V]."""
    half = half_of(worker)
    real = half.logits

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        rows_RV = real(hidden_RD).clone()
        spoil(rows_RV)
        return rows_RV

    with patch.object(half, "logits", logits):
        yield


def only_in_company(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Change the second row of logits of a batch of three."""
    return lambda rows_RV: change(rows_RV[1]) if len(rows_RV) == len(PROMPTS) else None


def alone(client: RankConnection, sampling: Sampling) -> list[list[int]]:
    return [client.generated(client.submit(ids, sampling=sampling))[0] for ids in PROMPTS]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonfinite_logits_fail_only_their_sequence(
    rank: tuple[Rank, RankConnection], value: float, temperature: float
) -> None:
    worker, client = rank
    sampling = Sampling(max_tokens=3, temperature=temperature, seed=11, ignore_eos=True)
    wanted = alone(client, sampling)
    spoil = only_in_company(lambda row_V: row_V[3].fill_(value))
    with logits_spoiled(worker, spoil):
        with meeting(worker, len(PROMPTS)):
            first, second, third = (client.submit(ids, sampling=sampling) for ids in PROMPTS)
        failed = client.failed(second)
        assert (failed.code, failed.status) == ("sampling_failed", 500)
        assert "finite" in failed.message
        assert "\n" not in failed.message
        assert [client.generated(i)[0] for i in (first, third)] == [wanted[0], wanted[2]]
    assert worker.status().healthy
    assert worker.status().sections["kv_blocks"]["used"] == 0
    assert client.generated(client.submit(PROMPTS[1], sampling=sampling))[0] == wanted[1]


def test_prefix_with_nonfinite_logits_is_not_cached(
    rank: tuple[Rank, RankConnection],
) -> None:
    worker, client = rank
    prompt = [40 + i for i in range(50)]
    with logits_spoiled(worker, lambda rows_RV: rows_RV.fill_(math.nan)):
        client.failed(client.submit(prompt, sampling=greedy(1)))
    assert worker.status().sections["kv_blocks"]["used"] == 0
    cached = [
        client.generated(client.submit(prompt, sampling=greedy(1)))[1].usage.cached_tokens
        for _ in range(2)
    ]
    assert cached == [0, 49]
    loop_of(worker).scheduler.blocks.check([])


@pytest.mark.parametrize(
    "fields", [{"candidates": [3, 4]}, {"score_from": 1}, {"score_from": 2, "score_top": 3}]
)
def test_nonfinite_scores_fail_their_sequence(
    rank: tuple[Rank, RankConnection], fields: dict[str, Any]
) -> None:
    worker, client = rank
    with logits_spoiled(worker, lambda rows_RV: rows_RV.fill_(math.nan)):
        failed = client.failed(client.submit(PROMPTS[0], **fields))
    assert failed.code == "sampling_failed"
    client.scored(client.submit(PROMPTS[0], **fields))


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("of a kernel")])
@pytest.mark.parametrize("where", ["_draw", "token_logprob"])
def test_sampling_error_fails_its_sequence(
    rank: tuple[Rank, RankConnection], where: str, error: Exception
) -> None:
    worker, client = rank
    plain, drawn = greedy(2), Sampling(max_tokens=2, seed=1, logprobs=2)
    wanted, _ = client.generated(client.submit(PROMPTS[0], sampling=plain))
    with patch(f"actors.batching.sampler.{where}", side_effect=error):
        with meeting(worker, 2):
            first = client.submit(PROMPTS[0], sampling=plain)
            second = client.submit(PROMPTS[1], sampling=drawn)
        failed = client.failed(second)
        assert client.generated(first)[0] == wanted
    assert (failed.code, failed.status) == ("sampling_failed", 500)
    assert str(error) not in failed.message  # that is for the log
    assert worker.status().healthy


def test_failed_batch_allocation_is_retried_per_sequence(
    rank: tuple[Rank, RankConnection],
) -> None:
    worker, client = rank
    wanted = alone(client, greedy(1))
    half = half_of(worker)
    real = half.logits

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        if len(hidden_RD) > 1:
            raise MemoryError
        return real(hidden_RD)

    with patch.object(half, "logits", logits):
        with meeting(worker, len(PROMPTS)):
            ids = [client.submit(ids, sampling=greedy(1)) for ids in PROMPTS]
        assert [client.generated(i)[0] for i in ids] == wanted


def test_only_the_request_with_failing_admission_fails(
    rank: tuple[Rank, RankConnection],
) -> None:
    worker, client = rank
    with patch.object(loop_of(worker).scheduler, "add", side_effect=MemoryError):
        failed: Failed = client.failed(client.submit(PROMPTS[0], sampling=greedy(1)))
    assert (failed.code, failed.status) == ("internal_error", 500)
    assert worker.status().healthy
    assert worker.status().waiting == 0
    client.generated(client.submit(PROMPTS[0], sampling=greedy(1)))


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
