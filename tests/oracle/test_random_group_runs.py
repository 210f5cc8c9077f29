"""Random groups, plans, traffic and numbers of live batches, beside the single-process path."""

import random
from functools import partial

import pytest

import tests.support.group_harness as harness
from actors.ranks.attention_rank import attention_rank
from contracts.plan import Order, Plan
from planner.scheduling.batching import joining
from tests.oracle.random_requests import check_random_requests
from tests.support.group_harness import ThreadGroup, group_config
from tests.support.local_model import LocalModel
from tests.support.tiny_models import FAMILIES, UNUSUAL_FAMILIES, Checkpoints

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
@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL_FAMILIES])
def test_random_runs_give_the_logits_and_tokens_of_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str, monkeypatch: pytest.MonkeyPatch
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
                check_random_requests(chance, client, local, client.submit, f"{seed} {plan.label}")
