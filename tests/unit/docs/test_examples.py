"""The examples of docs/adding and docs/policies.md run.

The Python blocks of a page are one module; its tests are collected here.
"""

import functools
import math
import random
import re
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
from tests.support.group_harness import ThreadGroup, group_config, loop_of
from tests.support.local_model import LocalModel
from tests.support.tiny_models import VOCABULARY, Checkpoints

PAGES = sorted(path for path in (ROOT / "docs/adding").glob("*.md") if path.stem != "README")

POLICIES = ROOT / "docs/policies.md"
NAMES = ["EarliestDeadline", "FairByTenant", "ShortestPrefill"]
LS, BE = Priority.LS, Priority.BE

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def module_of(page: Path) -> ModuleType:
    """Run all blocks of the page, with the line numbers of the page."""
    module = ModuleType(f"docs_adding_{page.stem}")
    sys.modules[module.__name__] = module
    whole = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(whole):
        padding = "\n" * (whole[: block.start()].count("\n") + 1)
        exec(compile(padding + block[1], str(page), "exec"), vars(module))
    return module


def collected_from(page: Path) -> dict[str, Callable[..., Any]]:
    return {
        f"test_{page.stem}_{name.removeprefix('test_')}": value
        for name, value in vars(module_of(page)).items()
        if name.startswith("test_")
    }


for _page in PAGES:
    globals().update(collected_from(_page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_test_and_ends_with_places_touched(page: Path) -> None:
    assert any(name.startswith(f"test_{page.stem}_") for name in globals())
    *_, last = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert last.startswith("Places touched\n")
    assert "```" not in last


@pytest.fixture
def my_policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = module_of(POLICIES)
    monkeypatch.setitem(sys.modules, "my_policies", module)
    return module


def view(key: int, tokens: int, tenant: bytes = b"", due_s: float = math.inf) -> SequenceView:
    return SequenceView(key, LS, Phase.PREFILL, tokens, 0, due_s, float(key), tenant)


def form(name: str) -> Callable[..., Any]:
    found = load_policy(f"my_policies:{name}").form
    assert found is not None
    return found


@pytest.mark.usefixtures("my_policies")
def test_earliest_deadline_or_shortest_prefill_is_first() -> None:
    assert form("ShortestPrefill")([view(1, 9), view(2, 1), view(3, 4)]) == [2, 3, 1]
    views = [view(1, 9, due_s=5.0), view(2, 9), view(3, 9, due_s=4.0)]
    assert form("EarliestDeadline")(views) == [3, 1, 2]
    pick = load_policy("my_policies:EarliestDeadline").pick
    assert pick is not None
    task = functools.partial(Task, LS, 4, 0, 0, TaskStage.ATTENTION, Order.ASAS)
    tasks = [task(due_s=due_s) for due_s in (5.0, 4.0)]
    assert pick(tasks) is tasks[1]


@pytest.mark.usefixtures("my_policies")
def test_tenants_get_equal_shares_without_credit_for_idle_time() -> None:
    fair = form("FairByTenant")
    many = [view(n, 1000, b"a") for n in range(20)]
    assert len(fair(many)) == 5
    both = [*many, *(view(n, 1000, b"b") for n in range(20, 40))]
    assert sum(key >= 20 for key in fair(both)) == 3, "half of the current batch"
    assert sum(key >= 20 for key in fair(both)) in (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_policy_on_rank_changes_no_answer(
    tiny_checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    my_policies: ModuleType,
    name: str,
) -> None:
    kind, calls = getattr(my_policies, name), [0]
    its_form = kind.form

    def counted(self: object, views: list[SequenceView]) -> object:
        calls[0] += 1
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
    expected = local.last_logits(sequences)
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
        found = client.logits(ids)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        (rank,) = group.attention
        assert "tandem_policy_fallbacks_total 0.0" in rank.metrics() or (
            "tandem_policy_fallbacks_total" not in rank.metrics()
        )
        assert loop_of(rank).scheduler.blocks.counts["used"] == 0
    assert calls[0] > 3
