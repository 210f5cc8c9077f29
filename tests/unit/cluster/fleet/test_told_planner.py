"""Where ranks look for a planner that has been replaced."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import Formation, Seat, make_specs
from cluster.fleet.member import Member, Place
from cluster.fleet.nodes import Placed
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.told_planner import ToldPlanner
from contracts.loading import load_config
from contracts.worker import RankReady


class FakeRank(RayRank):
    """Keeps what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.told: list[tuple[Any, ...]] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.told.append((method, *arguments))
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer


class Rig:
    """An attention rank, an expert rank, a planner, and a prefill worker, which asks none."""

    def __init__(self, planners: int = 1) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        formation = Formation(load_config(None, ["groups.prefill_ranks=1"]), "", b"", 1, "shm")
        specs = make_specs(formation, seats, seats, seats * planners, seats)
        placed = Placed([], None, "cpu", [])
        self.members = []
        for place, spec in enumerate(specs):
            ready = RankReady(name=spec.name, pid=place, channel_address=f"tcp:here:{place}")
            self.members.append(Member(spec, Place(placed, place), FakeRank(spec.name), ready))
        ends = (2, 3, 3 + planners)
        parts = zip((0, *ends[:2]), ends, strict=True)
        self.groups = [RankGroup(self.members[a:b], formation) for a, b in parts if a < b]
        self.told = ToldPlanner(self.groups)

    def told_since(self) -> dict[str, list[tuple[Any, ...]]]:
        """By rank, in one round."""
        self.told.update()
        found = {}
        for member in self.members:
            assert isinstance(member.handle, FakeRank)
            if member.handle.told:
                found[member.name], member.handle.told = member.handle.told, []
        return found

    def replace(self, place: int) -> None:
        """By another process, somewhere else."""
        member = self.members[place]
        pid = member.ready.pid + 100
        ready = msgspec.structs.replace(member.ready, pid=pid, channel_address=f"tcp:here:{pid}")
        member.settle(member.spec, FakeRank(member.name), ready)


def test_ranks_are_told_once_that_another_planner_is_there() -> None:
    rig = Rig()
    assert not rig.told_since()
    planner = rig.groups[-1].members[0]
    place = rig.members.index(planner)
    planner.replaced_for = "its actor died"
    assert not rig.told_since(), "there is none"
    rig.replace(place)
    told = [("join_planner", planner.ready.channel_address)]
    assert rig.told_since() == {"attention-0": told, "expert-0": told}
    assert not rig.told_since()


def test_a_rank_that_came_meanwhile_is_told_too() -> None:
    rig = Rig()
    rig.replace(0)
    assert list(rig.told_since()) == ["attention-0"]
    rig.members[1].replaced_for = "it hangs"
    rig.replace(rig.members.index(rig.groups[-1].members[0]))
    assert list(rig.told_since()) == ["attention-0"]
    rig.replace(1)
    assert list(rig.told_since()) == ["expert-0"]


def test_where_there_is_no_planner_nobody_is_told_anything() -> None:
    rig = Rig(planners=0)
    rig.replace(0)
    assert not rig.told_since()


def test_the_planner_is_told_once_how_many_ranks_there_are_and_specs_say_so() -> None:
    rig = Rig()
    assert not rig.told_since()
    first, *_ = rig.members
    spec = msgspec.structs.replace(first.spec, rank=1)
    rig.members.append(Member(spec, first.place, FakeRank(spec.name), first.ready))
    rig.groups[0].join(rig.members[-1])
    assert rig.told_since()["planner-0"] == [("resize", 2, 1)]
    assert not rig.told_since()
    assert [one.spec.attention_ranks for one in rig.members[:2]] == [2, 2]
    rig.groups[0].leave(rig.members[-1])
    assert rig.told_since()["planner-0"] == [("resize", 1, 1)]


def test_a_planner_that_was_made_for_fewer_is_told() -> None:
    """One that takes a lost one's place, begun before another attention rank has come."""
    rig = Rig()
    rig.told_since()
    first, planner = rig.members[0], rig.groups[-1].members[0]
    made_before = planner.spec
    spec = msgspec.structs.replace(first.spec, rank=1)
    rig.groups[0].join(Member(spec, first.place, FakeRank(spec.name), first.ready))
    rig.told_since()
    assert planner.spec.attention_ranks == 2
    rig.replace(rig.members.index(planner))
    assert "planner-0" not in rig.told_since()
    planner.spec = made_before
    rig.replace(rig.members.index(planner))
    assert rig.told_since()["planner-0"] == [("resize", 2, 1)]
