"""Prefill workers that divide the experts among them, against a worker that has them all."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.group_harness import PrefillThreads, RankConnection, prefill_config
from tests.support.tiny_models import HALVES, VOCABULARY, Checkpoints, crossed, prompts

SEEN_WITHIN_S = 10.0
ROWS = prompts(1, [23, 1, 140, 7])
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "num_hidden_layers": 5, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5}),
    ("deepseek_v3", {"num_hidden_layers": 4}),
    ("gpt_oss", {"num_local_experts": 5, "num_hidden_layers": 4}),
]


def logits_of(client: RankConnection) -> torch.Tensor:
    """Of rows one at a time, so that all modes run the same batches."""
    return torch.cat([client.last_logits([ids]) for ids in ROWS])


def resident_logits(folder: Path) -> torch.Tensor:
    with PrefillThreads(folder, prefill_config()) as group, group.client() as client:
        return logits_of(client)


def all_logits(folder: Path, workers: int, backend: str, **prefill: Any) -> list[torch.Tensor]:
    config = prefill_config(prefill=prefill)
    found = []
    with PrefillThreads(folder, config, workers=workers, backend=backend) as group:
        for rank in range(workers):
            with group.client(rank) as client:
                found.append(logits_of(client))
        assert not any(worker.status().notes["degraded"] for worker in group.workers)
    return found


@pytest.mark.parametrize(("family", "overrides", "half"), crossed(FAMILIES, HALVES))
def test_gathered_and_hybrid_logits_equal_resident_ones_to_the_bit(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, overrides: dict[str, Any], half: int
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    expected = resident_logits(folder)
    hybrid = {"experts": "hybrid", "shard_prefetch_layers": 1, "host_store": str(tmp_path)}
    for workers, backend, mode in (
        (1, "tcp", {"experts": "gathered"}),
        (2, "shm", {"experts": "gathered", "disable_kv_cache": True}),
        (2, "shm", hybrid),
        (3, "tcp", {"experts": "gathered", "resident_layers": 2}),
        (3, "tcp", hybrid),
    )[half::2]:
        for logits in all_logits(folder, workers, backend, **mode):
            assert torch.equal(logits, expected), (workers, backend, mode)


@pytest.mark.parametrize(("family", "overrides", "half"), crossed(FAMILIES, HALVES))
def test_all_to_all_logits_equal_resident_ones(
    tiny_checkpoint: Checkpoints,
    family: str,
    overrides: dict[str, Any],
    half: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tandem.worker")
    folder = tiny_checkpoint(family, **overrides)
    expected = resident_logits(folder)
    assert "preemption_disabled" not in caplog.text
    for workers, backend in ((1, "shm"), (2, "tcp"), (3, "shm"))[half::2]:
        for logits in all_logits(folder, workers, backend, experts="all_to_all"):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert "preemption_disabled rank=prefill-0" in caplog.text


def test_a_worker_goes_on_alone_when_the_one_it_gathers_from_is_gone(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=5)
    expected = resident_logits(folder)
    config = prefill_config(prefill={"experts": "gathered"}, kv={"prefix_cache": False})
    with PrefillThreads(folder, config, workers=2, backend="tcp") as group:
        with group.client(0) as client:
            assert torch.equal(logits_of(client), expected)
            group.workers[1].stop()
            assert torch.equal(logits_of(client), expected)
        status = group.workers[0].status()
        assert status.healthy
        assert "prefill-1" in status.notes["degraded"]
        assert status.sections["channel_bytes"]["received"] > 0
        assert status.sections["channel_bytes"]["sent"] > 0


def test_in_lockstep_requests_fail_with_the_name_of_the_worker_that_is_gone(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    config = prefill_config(prefill={"experts": "all_to_all"})
    with PrefillThreads(folder, config, workers=2, backend="tcp") as group:
        with group.client(0) as client:
            logits_of(client)
            group.workers[1].stop()
            start_s = time.monotonic()
            failed = client.failed(client.submit(ROWS[0], candidates=VOCABULARY))
            assert time.monotonic() - start_s < SEEN_WITHIN_S
            assert "prefill-1" in failed.message
        assert not group.workers[0].status().healthy
