"""Experts placed in any order, another in each layer, some with replicas: the group's answers are
those of the single-process path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.ranks.local_group import LocalGroup
from contracts.plan import Order, Plan
from contracts.worker import Group
from models.decoder.local import LocalModel
from models.spec.model import read_spec
from tests.support.group_harness import RankConnection, greedy, group_config
from tests.support.placements import replicated
from tests.support.tiny_models import prompts

Checkpoints = Callable[..., Path]
CALL_S = 30.0
VOCABULARY = list(range(131))
PLANS = [Plan(), Plan(r1=2, r2=3), Plan(order=Order.AASS, r1=3, r2=2)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replicated_experts_give_the_logits_of_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    folder = tiny_checkpoint(family)
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    placement = replicated(
        spec.num_experts,
        [2, 0, 3],
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        seed=7,
    )
    config = group_config(1, 3)
    with LocalGroup(str(folder), config, placements={Group.EXPERT: placement}) as group:
        ((name, address),) = group.client_addresses.items()
        with RankConnection(name, address, group.token) as client:
            for number, plan in enumerate(PLANS):
                group.processes[name].call("pin_plan", plan).result(CALL_S)
                _check(client, local, prompts(number, [23, 1, 40, 7, 64]))


def _check(client: RankConnection, local: LocalModel, sequences: list[list[int]]) -> None:
    expected = torch.stack([logits[-1] for logits in local.forward(sequences)])
    ids = [client.submit(seq, candidates=VOCABULARY) for seq in sequences]
    found = torch.tensor([client.scored(request).candidate_logits for request in ids])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    ids = [client.submit(seq, sampling=greedy(6)) for seq in sequences]
    tokens = [client.generated(request)[0] for request in ids]
    assert tokens == [local.greedy(seq, 6) for seq in sequences]
