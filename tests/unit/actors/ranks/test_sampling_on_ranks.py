"""Sampling on attention ranks and prefill workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.requests import Sampling
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    ThreadGroup,
    group_config,
    prefill_config,
    rank_of,
)

pytestmark = pytest.mark.long

Checkpoints = Callable[..., Path]
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
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"seed": 2**64 - 1}, "seed"),
    ({"presence_penalty": math.inf}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logit_bias": {500: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -7}, "max_tokens"),
    ({"logprobs": 10**9}, "logprobs"),
    ({"choices": []}, "choices"),
    ({"choices": [[]]}, "choices"),
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


CHOICES = [[40, 41], [40, 41, 42, 43], [50]]


def test_prefix_choice_ends_with_eos(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder, ends = tiny_checkpoint("qwen3_moe"), set()
    with ThreadGroup(folder, group_config()) as group, group.client() as client:
        for seed in range(30):
            sampling = Sampling(
                max_tokens=4, temperature=2.0, seed=seed, choices=CHOICES, ignore_eos=seed > 15
            )
            request = client.submit(PROMPT, sampling=sampling, eos_token_ids=[EOS])
            ids, last = client.generated(request)
            assert last.reason == "stop"
            ends.add(tuple(ids))
    assert ends == {(40, 41, EOS), (40, 41, 42, 43), (50,)}


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


def test_seed_gives_equal_tokens_on_both_kinds_of_ranks(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    sampling = Sampling(max_tokens=12, seed=5, top_k=20, frequency_penalty=1.0, ignore_eos=True)
    two = group_config(2, 1)
    with ThreadGroup(folder, two) as group, group.client(0) as first, group.client(1) as second:
        wanted, _ = first.generated(first.submit(PROMPT, sampling=sampling))
        assert second.generated(second.submit(PROMPT, sampling=sampling))[0] == wanted
    config = prefill_config(prefill={"disable_kv_cache": False})
    with PrefillThreads(folder, config) as workers, workers.client() as third:
        assert third.generated(third.submit(PROMPT, sampling=sampling))[0] == wanted
