"""Batches that prefill workers compute together, against a worker that computes alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actors.gather.shuffled import BatchChoice, ShuffledBackend
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    loop_of,
    meeting,
    prefill_config,
)
from tests.support.tiny_models import VOCABULARY, Checkpoints, prompts

ROWS = prompts(1, [23, 1, 140, 7])
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "num_hidden_layers": 5, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5}),  # 2 KV heads on 3 workers are on several
    ("deepseek_v2", {}),
    ("deepseek_v3", {"num_hidden_layers": 4}),
    ("gpt_oss", {"num_local_experts": 5, "num_hidden_layers": 4}),
    ("qwen2_moe", {}),
    ("afmoe", {}),
    ("llama4_text", {}),
]


def logits_of(client: RankConnection, rows: Sequence[Sequence[int]] = ROWS) -> torch.Tensor:
    return torch.cat([client.last_logits([ids]) for ids in rows])


def alone_logits(
    folder: Path, rows: Sequence[Sequence[int]] = ROWS, **sections: Any
) -> torch.Tensor:
    config = prefill_config(**sections)
    with PrefillThreads(folder, config) as group, group.client() as client:
        return logits_of(client, rows)


def backend_of(group: PrefillThreads, rank: int) -> ShuffledBackend:
    backend = loop_of(group.workers[rank]).executor._backend
    assert isinstance(backend, ShuffledBackend)
    return backend


@contextmanager
def sharing(
    folder: Path, workers: int, backend: str = "shm", **sections: Any
) -> Iterator[PrefillThreads]:
    """Run workers that share every batch."""
    sections["prefill"] = {"experts": "shuffled", **sections.get("prefill", {})}
    config = prefill_config(**sections)
    with (
        patch.object(BatchChoice, "gain_s", return_value=60.0),
        PrefillThreads(folder, config, workers=workers, backend=backend) as group,
    ):
        yield group


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_logits_of_shared_batches_equal_those_of_one_worker(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    expected = alone_logits(folder)
    for workers, backend in ((2, "shm"), (3, "tcp")):
        found = []
        with sharing(folder, workers, backend) as group:
            for rank in range(workers):
                with group.client(rank) as client:
                    found.append(logits_of(client))
                assert backend_of(group, rank).passes == len(ROWS)
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


PREFIX = prompts(2, [70])[0]
WITH_PREFIX = [PREFIX + tail for tail in prompts(3, [90, 5, 33, 1])]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_prefixes_and_chunks_are_read_across_shared_and_lone_batches(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    folder = tiny_checkpoint(family)
    chunks = {"prefill": {"max_batch_tokens": 48}}
    expected = alone_logits(folder, WITH_PREFIX, **chunks)
    for workers in (2, 3):
        with (
            sharing(folder, workers, **chunks) as group,
            patch.object(BatchChoice, "gain_s", side_effect=itertools.cycle([60.0, 0.0, 60.0])),
            group.client() as client,
        ):
            found = logits_of(client, WITH_PREFIX)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert backend_of(group, 0).passes >= 4


@pytest.mark.parametrize("disable_kv_cache", [True, False])
def test_sequences_share_blocks_within_a_shared_batch(
    tiny_checkpoint: Checkpoints, disable_kv_cache: bool
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    expected = alone_logits(folder, WITH_PREFIX)
    prefill = {"disable_kv_cache": disable_kv_cache}
    with sharing(folder, 2, prefill=prefill) as group, group.client() as client:
        with meeting(group.workers[0], len(WITH_PREFIX)):
            ids = [client.submit(row, candidates=VOCABULARY) for row in WITH_PREFIX]
        torch.testing.assert_close(client.logits(ids), expected, atol=1e-5, rtol=0)
        assert backend_of(group, 0).passes == 1

