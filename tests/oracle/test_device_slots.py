"""A worker with experts in slots, as on a GPU, beside one that keeps all: tokens and logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.gather import expert_supply
from actors.gather.expert_supply import ExpertSupply
from actors.telemetry.telemetry import Telemetry, Timeline
from contracts.ranks import RankSpec
from models.experts.expert_layout import ExpertLayout
from tests.support.group_harness import PrefillThreads, greedy, prefill_config
from tests.support.tiny_models import Checkpoints, prompts


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def supply(
        spec: RankSpec, layout: ExpertLayout, timeline: Timeline, telemetry: Telemetry
    ) -> ExpertSupply:
        plain = ExpertLayout(layout.spec, layout.dtype, layout.device, packed=False)
        return expert_supply.device_supply(spec, plain, timeline, telemetry)

    monkeypatch.setattr(expert_supply, "cached_supply", supply)


def answers(folder: Path, store: Path, slots: int | None, **experts: Any) -> tuple[Any, Any]:
    """Return the logits after each prompt, and the tokens generated after all of them."""
    sequences = prompts(5, [5, 19, 130, 1])
    prefill: dict[str, Any] = {"host_store": str(store), "max_batch_tokens": 64}
    if slots is not None:
        prefill["experts"] = "cached"
        experts = {"slots": slots, **experts}
    config = prefill_config(prefill=prefill, experts=experts)
    with PrefillThreads(folder, config) as group, group.client() as client:
        logits = torch.cat([client.last_logits([ids]) for ids in sequences])
        ids = [client.submit(s, sampling=greedy(12)) for s in sequences]
        tokens = [client.generated(request)[0] for request in ids]
    return logits, tokens


@pytest.mark.long
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_slots_hints_and_eviction_change_no_bit(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    """A CPU adds resident experts in another order. Each prompt is sent again to hit its prefix."""
    folder = tiny_checkpoint(family)
    near, tokens = answers(folder, tmp_path, None)
    exact, all_there = answers(folder, tmp_path, 1000, predictor="none")
    assert all_there == tokens
    torch.testing.assert_close(exact, near, atol=1e-5, rtol=0)
    for slots, experts in ((4, {}), (6, {"eviction_policy": "lru"}), (9, {"predictor": "none"})):
        logits, generated = answers(folder, tmp_path, slots, **experts)
        assert torch.equal(logits, exact), slots
        assert generated == tokens
