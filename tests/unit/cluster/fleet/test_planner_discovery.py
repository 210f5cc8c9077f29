"""Notifications about a replaced planner and about group sizes."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet.member import Member
from cluster.fleet.planner_discovery import PlannerDiscovery
from cluster.fleet.rank_group import RankGroup
from contracts.loading import load_config
from tests.support.started_ranks import StartedRank, rank_of, started_member


class Rig:
    """An attention rank, an expert rank, a prefill worker without need of a planner, a planner."""

    def __init__(self) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(load_config(None, ["groups.prefill_ranks=1"]), "", b"", 1, "shm")
        specs = make_specs(group_spec, seats, seats, seats, seats)
        self.members = [started_member(spec) for spec in specs]
        parts = (self.members[:2], self.members[2:3], self.members[3:])
        self.groups = [RankGroup(members, group_spec) for members in parts]
        self.planner = self.members[-1]
        self.discovery = PlannerDiscovery(self.groups)

    def calls(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return the calls of one round by rank."""
        self.discovery.update()
        found = {}
        for member in self.members:
            if (rank := rank_of(member)).calls:
                found[member.name], rank.calls = rank.calls, []
        return found

    def replace(self, member: Member) -> None:
        """Replace the process by another one elsewhere."""
        pid = member.ready.pid + 100
        ready = msgspec.structs.replace(member.ready, pid=pid, channel_address=f"tcp:here:{pid}")
        member.assign(member.spec, StartedRank(member.name), ready)

    def add_attention_rank(self) -> Member:
        added = started_member(msgspec.structs.replace(self.members[0].spec, rank=1))
        self.groups[0].join(added)
        return added


def test_ranks_are_notified_once_of_a_new_planner() -> None:
    rig = Rig()
    assert not rig.calls()
    rig.planner.replacement_reason = "its actor died"
    assert not rig.calls(), "there is none"
    rig.replace(rig.planner)
    calls = [("join_planner", rig.planner.ready.channel_address)]
    assert rig.calls() == {"attention-0": calls, "expert-0": calls}
    assert not rig.calls()


def test_rank_added_later_is_notified() -> None:
    rig = Rig()
    attention, expert, *_ = rig.members
    rig.replace(attention)
    assert list(rig.calls()) == ["attention-0"]
    expert.replacement_reason = "it hangs"
    rig.replace(rig.planner)
    assert list(rig.calls()) == ["attention-0"]
    rig.replace(expert)
    assert list(rig.calls()) == ["expert-0"]


def test_planner_is_resized_once_per_change_and_when_replaced_with_an_old_size() -> None:
    rig = Rig()
    assert not rig.calls()
    made_before = rig.planner.spec
    added = rig.add_attention_rank()
    assert rig.calls()["planner-0"] == [("resize", 2, 1)]
    assert not rig.calls()
    assert [one.spec.attention_ranks for one in (rig.members[0], added, rig.planner)] == [2] * 3
    rig.replace(rig.planner)
    assert "planner-0" not in rig.calls()
    rig.planner.spec = made_before
    rig.replace(rig.planner)
    assert rig.calls()["planner-0"] == [("resize", 2, 1)]
    rig.groups[0].leave(added)
    assert rig.calls()["planner-0"] == [("resize", 1, 1)]
