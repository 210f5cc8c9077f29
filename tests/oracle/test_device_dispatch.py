"""Logits and tokens of a group whose dispatch, experts and combine run as on a device.

With CPU tensors, for all families, placements with replicas and several attention ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels.device
from actors.moe import remote_backend
from contracts.plan import Order, Plan
from contracts.ranks import Group
from models.experts.expert_half import ExpertHalf
from models.spec.model import read_spec
from tests.support.group_harness import ThreadGroup, greedy, group_config
from tests.support.placements import replicated
from tests.support.tiny_models import Checkpoints, prompts
from tests.support.transformers_oracle import Oracle

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {"num_local_experts": 5}),
]
PLANS = [Plan(order=Order.NAIVE), Plan(r1=2, r2=3), Plan(order=Order.AASS, r1=3, r2=2)]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the host's path may run."""
    monkeypatch.setattr(remote_backend, "plan_dispatch", None)
    monkeypatch.setattr(ExpertHalf, "steps", None)
    monkeypatch.setattr(kernels.device, "ACCELERATORS", frozenset({"cpu"}))


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
@pytest.mark.parametrize("extra", [None, [1, 0, 2]], ids=["contiguous", "replicas"])
def test_logits_and_tokens_equal_transformers(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any], extra: list[int] | None
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    spec, oracle, placements = read_spec(folder), Oracle(folder), None
    if extra is not None:
        placed = replicated(
            spec.num_experts,
            extra,
            num_layers=spec.num_layers,
            moe_layers=spec.moe_layers,
            seed=7,
        )
        placements = {Group.EXPERT: placed}
    sequences = prompts(1, [23, 1, 40, 7])
    expected = torch.stack([oracle.logits(ids)[-1] for ids in sequences])
    config = group_config(2, 3)
    with ThreadGroup(folder, config, placements=placements) as group:
        for rank, plan in enumerate([*PLANS, PLANS[1]]):
            group.pin(plan)
            with group.client(rank % 2) as client:
                found = client.last_logits(sequences)
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
                request = client.submit(sequences[0], sampling=greedy(12))
                tokens, _ = client.generated(request)
                assert tokens == oracle.greedy_choices(sequences[0], tokens)
