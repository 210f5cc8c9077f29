"""What each group's policy does about ranks that are of no use."""

from __future__ import annotations

import pytest

from cluster.fleet.repair import Action, GiveUp, GroupHealth, Replace, repair_policy
from contracts.loading import load_config
from contracts.ranks import Group

NAMES = ("prefill-0", "prefill-1", "prefill-2")
LOST = {"prefill-0": "its loop failed", "prefill-2": "no answer for 3.1 s"}


def actions(group: Group, health: GroupHealth, *overrides: str) -> list[Action]:
    config = load_config(
        None, ["groups.prefill_ranks=3", "groups.recovery_timeout_s=10", *overrides]
    )
    return list(repair_policy(group, config)(health))


@pytest.mark.parametrize("experts", ["resident", "gathered", "all_to_all"])
@pytest.mark.parametrize("group", list(Group))
def test_healthy_ranks_need_no_action(group: Group, experts: str) -> None:
    assert not actions(group, GroupHealth(NAMES, {}, 0.0), f"prefill.experts={experts}")


def test_each_lost_prefill_worker_is_replaced_alone_and_at_once() -> None:
    assert actions(Group.PREFILL, GroupHealth(NAMES, LOST, 0.0), "prefill.experts=gathered") == [
        Replace(["prefill-0"], "prefill-0", "its loop failed"),
        Replace(["prefill-2"], "prefill-2", "no answer for 3.1 s"),
    ]


def test_lockstep_workers_are_replaced_together() -> None:
    assert actions(Group.PREFILL, GroupHealth(NAMES, LOST, 0.0), "prefill.experts=all_to_all") == [
        Replace(NAMES, "prefill-0", "its loop failed")
    ]


def test_attention_and_expert_ranks_are_replaced_each_alone_and_at_once() -> None:
    problems = {"attention-0": "its loop failed", "expert-0": "expert-0: its actor died"}
    assert actions(Group.ATTENTION, GroupHealth(tuple(problems), problems, 0.0)) == [
        Replace(["attention-0"], "attention-0", "its loop failed"),
        Replace(["expert-0"], "expert-0", "expert-0: its actor died"),
    ]


def test_unreplaced_attention_and_expert_ranks_fail_by_name() -> None:
    names, out = ("attention-0", "expert-0"), {"expert-0": "expert-0: its actor died"}
    assert not actions(Group.ATTENTION, GroupHealth(names, {}, 9.9, out))
    assert actions(Group.ATTENTION, GroupHealth(names, {}, 10.0, out)) == [
        GiveUp("expert-0: its actor died")
    ]
    assert actions(
        Group.ATTENTION, GroupHealth(names, {"attention-0": "it failed"}, 10.0, out)
    ) == [
        Replace(["attention-0"], "attention-0", "it failed"),
        GiveUp("expert-0: its actor died; attention-0: it failed"),
    ]


@pytest.mark.parametrize("experts", ["gathered", "all_to_all"])
def test_a_lost_planner_is_replaced_and_never_ends_a_server(experts: str) -> None:
    lost = GroupHealth(["planner-0"], {"planner-0": "died"}, 1e9)
    found = actions(Group.PLANNER, lost, f"prefill.experts={experts}")
    assert found == [Replace(["planner-0"], "planner-0", "died")]
