"""When a group whose lost rank nobody replaces is given up, and how it says so (FINDINGS B15)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet.member import CHECK_PERIOD_S, Member, RankBundle
from cluster.fleet.nodes import RankPlacement
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.supervisor import Supervisor
from contracts.errors import LaunchError
from contracts.loading import load_config
from contracts.ranks import RankReady, RankStatus

REPAIR_S = 10.0


class FakeRank(RayRank):
    """Answers `status` at once: with what is wrong, or well."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.reason = ""
        self.died = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.died:
            answer.set_exception(LaunchError(f"{self.name}: its actor died"))
        else:
            answer.set_result(
                RankStatus(name=self.name, healthy=not self.reason, reason=self.reason)
            )
        return answer


class UnplaceableRank(Supervisor):
    """Without Ray: nobody is killed, or found for a place."""

    def _replace(self, group: RankGroup, lost: Sequence[Member]) -> None:
        assert all(member in group.members for member in lost)


class Rig:
    """One attention rank, one expert rank, and the planner."""

    def __init__(self) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        config = load_config(None, [f"groups.recovery_timeout_s={REPAIR_S}"])
        group_spec = GroupSpec(config, "", b"", 1, "shm")
        specs = make_specs(group_spec, seats, seats, seats)
        self.ranks = [FakeRank(spec.name) for spec in specs]
        ready = [RankReady(name=spec.name, pid=1, channel_address="") for spec in specs]
        placed = RankPlacement([], None, "cpu", [])
        places = [RankBundle(placed, bundle) for bundle in range(3)]
        members = [Member(*each) for each in zip(specs, places, self.ranks, ready, strict=True)]
        self.group = RankGroup(members[:2], group_spec)
        self.planner = RankGroup(members[2:], group_spec)
        self.supervisor = UnplaceableRank([self.group, self.planner])
        self.now_s = 0.0

    def pass_time(self, seconds: float, *, stalled_s: float = 0.0) -> str:
        for _ in range(int(seconds / CHECK_PERIOD_S)):
            self.supervisor.check(self.now_s, stalled_s)
            self.now_s, stalled_s = self.now_s + CHECK_PERIOD_S, 0.0
        return self.group.beyond_repair


def test_group_fails_by_name_after_recovery_timeout() -> None:
    """FINDINGS B15."""
    rig = Rig()
    assert rig.pass_time(100.0) == ""
    rig.ranks[1].died = True
    rig.ranks[0].reason = "expert-0 closed its connection"
    assert rig.pass_time(REPAIR_S - 1.0) == ""
    reason = rig.pass_time(2.0)
    assert "expert-0: its actor died" in reason
    assert "attention-0: expert-0 closed its connection" in reason


def test_time_in_which_the_watch_itself_stood_still_does_not_count() -> None:
    rig = Rig()
    rig.ranks[1].died = True
    assert rig.pass_time(1.0) == ""
    rig.now_s += 100.0
    assert rig.pass_time(1.0, stalled_s=100.0) == ""
    assert rig.pass_time(REPAIR_S) != ""


def test_supervision_continues_when_on_round_fails() -> None:
    """Ray's GCS does not answer, say: nothing would be replaced any more."""
    rounds: list[int] = []
    again = threading.Event()

    def fail() -> None:
        rounds.append(len(rounds))
        if len(rounds) > 1:
            again.set()
        raise RuntimeError("nobody answers")

    supervisor = UnplaceableRank([], fail)
    supervisor.start()
    assert again.wait(10.0)
    supervisor.close(10.0)


def test_a_planner_that_is_lost_ends_nothing() -> None:
    rig = Rig()
    rig.ranks[2].died = True
    assert rig.pass_time(10 * REPAIR_S) == ""
    assert rig.planner.members[0].replacement_reason == "planner-0: its actor died"
