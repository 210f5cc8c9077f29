"""The examples of docs/policies.md: as they are loaded, and on a rank."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from contracts.plan import Order
from contracts.requests import Caller, Priority
from planner.scheduling.batching import Phase, SequenceView
from planner.scheduling.task_order import Task, TaskStage
from planner.scheduling.user_policy import load_policy
from tests.architecture.support import ROOT
from tests.oracle.test_group_fidelity import VOCABULARY, last_logits
from tests.support.group_harness import ThreadGroup, group_config, loop_of
from tests.support.local_model import LocalModel
from tests.unit.docs.test_adding import blocks_of, module_of

PAGE = ROOT / "docs/policies.md"
NAMES = ["EarliestDeadline", "FairByTenant", "ShortestPrefill"]
LS, BE = Priority.LS, Priority.BE


@pytest.fixture(autouse=True)
def my_policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = module_of(PAGE)
    monkeypatch.setitem(sys.modules, "my_policies", module)
    return module


def view(key: int, tokens: int, tenant: bytes = b"", due_s: float = math.inf) -> SequenceView:
    return SequenceView(key, LS, Phase.PREFILL, tokens, 0, due_s, float(key), tenant)


def form(name: str) -> Callable[..., Any]:
    found = load_policy(f"my_policies:{name}").form
    assert found is not None
    return found


def test_each_is_shorter_than_fifty_lines() -> None:
    blocks = blocks_of(PAGE)
    assert len(blocks) == len(NAMES)
    assert all(len(block.splitlines()) < 50 for block in blocks)


def test_the_earliest_deadline_goes_first() -> None:
    views = [view(1, 9, due_s=5.0), view(2, 9), view(3, 9, due_s=4.0)]
    assert form("EarliestDeadline")(views) == [3, 1, 2]
    pick = load_policy("my_policies:EarliestDeadline").pick
    assert pick is not None
    tasks = [
        Task(LS, 4, 0, 0, TaskStage.ATTENTION, Order.ASAS, due_s=due_s) for due_s in (5.0, 4.0)
    ]
    assert pick(tasks) is tasks[1]


def test_tenants_are_given_as_much_each_and_who_comes_anew_has_saved_nothing_up() -> None:
    fair = form("FairByTenant")
    many = [view(n, 1000, b"a") for n in range(20)]
    assert len(fair(many)) == 5
    given = fair([*many, *(view(n, 1000, b"b") for n in range(20, 40))])
    assert sum(key >= 20 for key in given) == 3, "no more than its half of what is given now"
    given = fair([*many, *(view(n, 1000, b"b") for n in range(20, 40))])
    assert sum(key >= 20 for key in given) in (2, 3)


def test_the_shortest_prefill_goes_first() -> None:
    assert form("ShortestPrefill")([view(1, 9), view(2, 1), view(3, 4)]) == [2, 3, 1]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_on_a_rank_they_change_the_order_and_no_answer(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    my_policies: ModuleType,
    name: str,
) -> None:
    kind, asked = getattr(my_policies, name), [0]
    its_form = kind.form

    def counted(self: object, views: list[SequenceView]) -> object:
        asked[0] += 1
        return its_form(self, views)

    monkeypatch.setattr(kind, "form", counted)
    folder, chance = tiny_checkpoint("qwen3_moe"), random.Random(name)
    local = LocalModel.load(folder, dtype="float32")
    config = group_config(
        1, 1, priority={"policy": f"my_policies:{name}"}, schedule={"max_batch_tokens": 64}
    )
    sequences = [
        [chance.randrange(1, 131) for _ in range(chance.randint(1, 90))] for _ in range(12)
    ]
    expected = last_logits(local, sequences)
    with ThreadGroup(folder, config, backend="shm") as group, group.client() as client:
        ids = [
            client.submit(
                each,
                candidates=VOCABULARY,
                priority=(LS, BE)[index % 2],
                caller=Caller(bytes([index % 3]), index),
            )
            for index, each in enumerate(sequences)
        ]
        found = torch.tensor([client.scored(one).candidate_logits for one in ids])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        (rank,) = group.attention
        assert "tandem_policy_fallbacks_total 0.0" in rank.metrics() or (
            "tandem_policy_fallbacks_total" not in rank.metrics()
        )
        assert loop_of(rank).scheduler.blocks.counts["used"] == 0
    assert asked[0] > 3, "and it was asked"
