"""Random groups, plans, traffic and numbers of live batches, beside the single-process path."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import tests.support.group_harness as harness
from actors.ranks.attention_rank import attention_rank
from contracts.messages import Cancel
from contracts.plan import Order, Plan
from planner.scheduling.batching import joining
from tests.oracle.test_group_fidelity import VOCABULARY, last_logits
from tests.support.group_harness import ThreadGroup, greedy, group_config
from tests.support.local_model import LocalModel

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"]
RUNS_OF_EACH = 40


def random_plan(chance: random.Random) -> Plan:
    r1 = chance.randint(1, 4)
    order = chance.choice(list(Order))
    if order is Order.NAIVE:
        return Plan(order=order)
    lag = chance.randrange(r1) if order is Order.ASAS else 0
    r2 = 1 if order is Order.PPPIPE else chance.randint(1, 3)
    return Plan(r1=r1, r2=r2, order=order, shared_lag=lag)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_runs_give_the_logits_and_tokens_of_the_single_process_path(
    tiny_checkpoint: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools so small that sequences wait again, prompts that share, requests that are cancelled."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    for seed in range(RUNS_OF_EACH):
        chance = random.Random(f"{family} {seed}")
        batching = joining(most=chance.randint(1, 3), within_layers=chance.randint(0, 3))
        monkeypatch.setattr(harness, "attention_rank", partial(attention_rank, batching=batching))
        config = group_config(
            chance.randint(1, 2),
            chance.randint(1, 3),
            kv={"pool_tokens": 16 * chance.randint(14, 64)},
            schedule={"max_batch_tokens": chance.choice([32, 96, 512])},
        )
        plan = random_plan(chance)
        with ThreadGroup(folder, config, backend=chance.choice(["shm", "tcp"])) as group:
            group.pin(plan)
            with group.client() as client:
                _one_run(chance, client, local, f"{seed} {plan.label}")


def _one_run(
    chance: random.Random, client: harness.RankConnection, local: LocalModel, label: str
) -> None:
    head = [chance.randrange(1, 131) for _ in range(chance.choice([0, 20, 35]))]
    lengths = [chance.randint(1, 90) for _ in range(chance.randint(2, 8))]
    sequences = [head + [chance.randrange(1, 131) for _ in range(n)] for n in lengths]
    expected = last_logits(local, sequences)
    scored = [client.submit(ids, candidates=VOCABULARY) for ids in sequences]
    gone = [client.submit(ids, sampling=greedy(9)) for ids in sequences[:2]]
    generated = [client.submit(ids, sampling=greedy(3)) for ids in sequences]
    for request in gone:
        client.send(Cancel(request))
    found = torch.tensor([client.scored(request).candidate_logits for request in scored])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=label)
    tokens = [client.generated(request)[0] for request in generated]
    assert [row[0] for row in tokens] == expected.argmax(-1).tolist(), label
