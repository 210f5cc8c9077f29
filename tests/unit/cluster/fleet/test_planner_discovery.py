"""Where ranks look for a planner that has been replaced."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet.member import Member, RankBundle
from cluster.fleet.nodes import RankPlacement
from cluster.fleet.planner_discovery import PlannerDiscovery
from cluster.fleet.rank_group import RankGroup
from contracts.loading import load_config
from contracts.ranks import RankReady


class FakeRank(RayRank):
    """Keeps what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append((method, *arguments))
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer


class Rig:
    """An attention rank, an expert rank, a planner, and a prefill worker, which asks none."""

    def __init__(self, planners: int = 1) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(load_config(None, ["groups.prefill_ranks=1"]), "", b"", 1, "shm")
        specs = make_specs(group_spec, seats, seats, seats * planners, seats)
        placed = RankPlacement([], None, "cpu", [])
        self.members = []
        for place, spec in enumerate(specs):
            ready = RankReady(name=spec.name, pid=place, channel_address=f"tcp:here:{place}")
            self.members.append(Member(spec, RankBundle(placed, place), FakeRank(spec.name), ready))
        ends = (2, 3, 3 + planners)
        parts = zip((0, *ends[:2]), ends, strict=True)
        self.groups = [RankGroup(self.members[a:b], group_spec) for a, b in parts if a < b]
        self.calls = PlannerDiscovery(self.groups)

    def calls_since(self) -> dict[str, list[tuple[Any, ...]]]:
        """By rank, in one round."""
        self.calls.update()
        found = {}
        for member in self.members:
            assert isinstance(member.handle, FakeRank)
            if member.handle.calls:
                found[member.name], member.handle.calls = member.handle.calls, []
        return found

    def replace(self, place: int) -> None:
        """By another process, somewhere else."""
        member = self.members[place]
        pid = member.ready.pid + 100
        ready = msgspec.structs.replace(member.ready, pid=pid, channel_address=f"tcp:here:{pid}")
        member.assign(member.spec, FakeRank(member.name), ready)


def test_ranks_are_notified_once_of_a_new_planner() -> None:
    rig = Rig()
    assert not rig.calls_since()
    planner = rig.groups[-1].members[0]
    place = rig.members.index(planner)
    planner.replacement_reason = "its actor died"
    assert not rig.calls_since(), "there is none"
    rig.replace(place)
    calls = [("join_planner", planner.ready.channel_address)]
    assert rig.calls_since() == {"attention-0": calls, "expert-0": calls}
    assert not rig.calls_since()


def test_rank_added_later_is_notified() -> None:
    rig = Rig()
    rig.replace(0)
    assert list(rig.calls_since()) == ["attention-0"]
    rig.members[1].replacement_reason = "it hangs"
    rig.replace(rig.members.index(rig.groups[-1].members[0]))
    assert list(rig.calls_since()) == ["attention-0"]
    rig.replace(1)
    assert list(rig.calls_since()) == ["expert-0"]


def test_no_rank_is_notified_without_planner() -> None:
    rig = Rig(planners=0)
    rig.replace(0)
    assert not rig.calls_since()


def test_planner_is_resized_once_and_specs_follow() -> None:
    rig = Rig()
    assert not rig.calls_since()
    first, *_ = rig.members
    spec = msgspec.structs.replace(first.spec, rank=1)
    rig.members.append(Member(spec, first.place, FakeRank(spec.name), first.ready))
    rig.groups[0].join(rig.members[-1])
    assert rig.calls_since()["planner-0"] == [("resize", 2, 1)]
    assert not rig.calls_since()
    assert [one.spec.attention_ranks for one in rig.members[:2]] == [2, 2]
    rig.groups[0].leave(rig.members[-1])
    assert rig.calls_since()["planner-0"] == [("resize", 1, 1)]


def test_planner_with_smaller_group_size_is_resized() -> None:
    """One that takes a lost one's place, begun before another attention rank has come."""
    rig = Rig()
    rig.calls_since()
    first, planner = rig.members[0], rig.groups[-1].members[0]
    made_before = planner.spec
    spec = msgspec.structs.replace(first.spec, rank=1)
    rig.groups[0].join(Member(spec, first.place, FakeRank(spec.name), first.ready))
    rig.calls_since()
    assert planner.spec.attention_ranks == 2
    rig.replace(rig.members.index(planner))
    assert "planner-0" not in rig.calls_since()
    planner.spec = made_before
    rig.replace(rig.members.index(planner))
    assert rig.calls_since()["planner-0"] == [("resize", 2, 1)]
