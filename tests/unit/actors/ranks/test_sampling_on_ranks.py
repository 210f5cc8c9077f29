"""Sampling on attention ranks and prefill workers."""

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
from tests.support.tiny_models import Checkpoints

pytestmark = pytest.mark.long

PROMPT = [5, 6, 7, 8]
EOS = 2


@pytest.fixture(scope="module", params=["attention", "prefill"])
def client(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints
) -> Iterator[RankConnection]:
    """Return a client of either kind of rank; the prefill worker has no KV cache."""
    with rank_of(request.param, tiny_checkpoint("qwen3_moe"), disable_kv_cache=True) as (
        _,
        connection,
    ):
        yield connection


ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"seed": 2**64 - 1}, "seed"),
    ({"presence_penalty": math.inf}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logit_bias": {500: 1.0}}, "logit_bias"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 10**9}, "logprobs"),
    ({"choices": []}, "choices"),
    ({"choices": [[500]]}, "choices"),
    ({"choices": [[1]] * 300}, "choices"),
    ({"choices": [[1, 2, 3]]}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "named"), ABSURD, ids=[str(f)[:40] for f, _ in ABSURD])
def test_invalid_value_fails_only_its_request(
    client: RankConnection, fields: dict[str, Any], named: str
) -> None:
    failed = client.failed(client.submit(PROMPT, sampling=Sampling(**{"max_tokens": 1, **fields})))
    assert (failed.code, failed.status) == ("invalid_value", 400)
    assert named in failed.message


@pytest.mark.parametrize(
    "fields",
    [
        {"score_from": 0},
        {"score_from": -9},
        {"score_from": 1, "score_top": 10**9},
        {"generated": 1},
        {"generated": -1, "sampling": Sampling(max_tokens=1)},
        {"generated": 1, "sampling": Sampling(max_tokens=1)},
        {"generated": len(PROMPT), "sampling": Sampling(max_tokens=9)},
    ],
    ids=str,
)
def test_invalid_count_fails_only_its_request(
    client: RankConnection, fields: dict[str, Any]
) -> None:
    failed = client.failed(client.submit(PROMPT, **fields))
    assert (failed.code, failed.status) == ("invalid_value", 400)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_single_token_choice_needs_one_pass(client: RankConnection, temperature: float) -> None:
    sampling = Sampling(max_tokens=1, temperature=temperature, choices=[[40], [41], [42]], seed=1)
    ids, last = client.generated(client.submit(PROMPT, sampling=sampling, eos_token_ids=[EOS]))
    assert ids[0] in (40, 41, 42)
    assert (len(ids), last.reason) == (1, "stop")


def test_requeue_does_not_change_tokens(tiny_checkpoint: Checkpoints) -> None:
    """Seeds, penalties and choices, in a pool for half of the sequences."""
    settings = [
        Sampling(
            max_tokens=40,
            seed=seed,
            ignore_eos=True,
            top_p=0.95,
            presence_penalty=0.7,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            min_tokens=seed,
            choices=None if seed else [[3 + i for i in range(40)], [3, 90, *range(4, 40)]],
        )
        for seed in range(6)
    ]
    prompts = [[10 + seed, *range(20, 50)] for seed in range(6)]
    folder = tiny_checkpoint("qwen3_moe")
    answers = []
    for pool_tokens in (16 * 512, 16 * 14):
        config = group_config(kv={"pool_tokens": pool_tokens})
        with ThreadGroup(folder, config) as group, group.client() as client:
            requests = [
                client.submit(prompt, sampling=sampling, eos_token_ids=[EOS])
                for prompt, sampling in zip(prompts, settings, strict=True)
            ]
            answers.append([client.generated(request)[0] for request in requests])
            requeued = group.attention[0].status().sections["totals"]["requeued"]
    assert requeued > 0
    assert answers[0] == answers[1]


def test_seed_gives_equal_tokens_on_both_kinds_of_ranks(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    sampling = Sampling(max_tokens=12, seed=5, top_k=20, frequency_penalty=1.0, ignore_eos=True)
    two = group_config(2, 1)
    with ThreadGroup(folder, two) as group, group.client(0) as first, group.client(1) as second:
        wanted, _ = first.generated(first.submit(PROMPT, sampling=sampling))
        assert second.generated(second.submit(PROMPT, sampling=sampling))[0] == wanted
    config = prefill_config(prefill={"disable_kv_cache": False})
    with PrefillThreads(folder, config) as workers, workers.client() as third:
        assert third.generated(third.submit(PROMPT, sampling=sampling))[0] == wanted


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
    real = half.row_logits

    def row_logits(*arguments: Any) -> tuple[torch.Tensor, Any]:
        rows_RV = real(*arguments)[0].clone()
        spoil(rows_RV)
        return rows_RV, rows_RV.argmax(-1).numpy()

    with patch.object(half, "row_logits", row_logits):
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


def test_prefix_with_nonfinite_logits_is_not_cached(rank: tuple[Rank, RankConnection]) -> None:
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
@pytest.mark.parametrize("where", ["draw", "token_logprob"])
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


def test_failed_batch_allocation_is_retried_per_sequence(rank: tuple[Rank, RankConnection]) -> None:
    worker, client = rank
    wanted = alone(client, greedy(1))
    half = half_of(worker)
    real = half.row_logits

    def row_logits(hidden_TD: torch.Tensor, rows: list[int]) -> Any:
        if len(rows) > 1:
            raise MemoryError
        return real(hidden_TD, rows)

    with patch.object(half, "row_logits", row_logits):
        with meeting(worker, len(PROMPTS)):
            ids = [client.submit(ids, sampling=greedy(1)) for ids in PROMPTS]
        assert [client.generated(i)[0] for i in ids] == wanted


def test_only_the_request_with_failing_admission_fails(rank: tuple[Rank, RankConnection]) -> None:
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


@pytest.mark.parametrize("kind", ["attention", "prefill"])
def test_rank_with_nonfinite_first_pass_names_its_checkpoint(damaged: Path, kind: str) -> None:
    with rank_of(kind, damaged, saturation=None) as (worker, client):
        client.read_until(lambda: client.state is not None and not client.state.healthy)
        failed = client.failed(client.submit([1, 2, 3], candidates=[0]))
        for message in (failed.message, worker.status().reason):
            assert str(damaged) in message
            assert "not finite" in message
            assert "model.dtype" in message
        assert not worker.status().healthy
