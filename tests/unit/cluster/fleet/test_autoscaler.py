"""Prefill workers that come and go, without Ray: who is in the directory when, and who is ended."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from actors.ranks.rendezvous import GroupSpec
from cluster.fleet import autoscaler
from cluster.fleet.autoscaler import Autoscaler
from cluster.fleet.launch import launch_pipeline
from cluster.fleet.nodes import RankRequest
from contracts.errors import LaunchError, ResourceError
from contracts.loading import config_from
from contracts.ranks import Group
from tests.support.started_ranks import StartedRank, StartedRanks

FULL, EMPTY = 900.0, 0.0  # of a threshold of 1,000


class Rig(StartedRanks):
    """One worker, three at most. second: takes a look, all that are there having said how full
    they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.now_s, self.next_fails = 0.0, False
        self.next = self.comes
        monkeypatch.setattr(autoscaler, "POLL_PERIOD_S", 0.001)
        self.config = config_from(
            {
                "groups": {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": 1},
                "scaling": {
                    "max_prefill_ranks": 3,
                    "look_back_period_s": 2,
                    "downscale_delay_s": 5,
                },
            },
            source="test",
        )
        placed = self.place([RankRequest(Group.PREFILL, 0, {})])
        group_spec = GroupSpec(self.config, "", b"", 1, "auto")
        (self.group,) = launch_pipeline(group_spec, placed, Counter())
        self.scaler = Autoscaler(self.group, self.config)

    def comes(self, rank: StartedRank) -> None:
        rank.load, rank.fails = FULL, self.next_fails

    def second(self, count: int = 1) -> list[str]:
        """Who is in the directory then."""
        for _ in range(count):
            self.now_s += 1.0
            for member in self.group.members:
                for _ in range(2):  # asked, then heard
                    member.check(self.now_s, 0.0)
            self.scaler.poll(self.now_s)
        return list(self.group.client_addresses)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_full_workers_get_more_and_idle_ones_go_again_the_last_first(rig: Rig) -> None:
    assert rig.second(1) == ["prefill-0"]
    assert rig.second(20) == ["prefill-0", "prefill-1", "prefill-2"]
    assert [rank.spec.epoch for rank in rig.started] == [1, 2, 3]
    for rank in rig.started:
        rank.load = EMPTY
    assert rig.second(60) == ["prefill-0"]
    assert [rank.ends for rank in rig.started] == [[], *[["stop, 0 open", "killed"]] * 2]
    assert len(rig.released) == 2, "their room is free again"
    rig.started[0].load = FULL
    assert rig.second(5) == ["prefill-0", "prefill-1"]
    assert rig.started[-1].spec.epoch == 4, "another one than the last of this number"


def test_one_that_goes_answers_what_it_has_first(rig: Rig) -> None:
    rig.second(20)
    for rank in rig.started:
        rank.load, rank.open = EMPTY, 500
    rig.second(20)
    assert rig.started[2].ends == ["stop, 0 open", "killed"]


def test_failed_start_releases_resources_and_is_retried(rig: Rig) -> None:
    rig.next_fails = True
    with pytest.raises(LaunchError, match="its actor died"):
        rig.second(10)
    assert rig.started[1].ends == ["killed"]
    assert len(rig.released) == 1
    rig.next_fails, rig.has_no_room = False, True
    with pytest.raises(ResourceError):
        rig.second(10)
    rig.has_no_room = False
    assert rig.second(10)[:2] == ["prefill-0", "prefill-1"]


def test_no_scaling_during_replacement(rig: Rig) -> None:
    rig.group.members[0].replacement_reason = "it hung"
    assert rig.second(50) == ["prefill-0"]


def test_one_that_comes_while_all_end_is_ended_too(rig: Rig) -> None:
    closing: threading.Event = rig.scaler._closing
    closing.set()
    assert rig.second(10) == ["prefill-0"]
    assert all(rank.ends == ["killed"] for rank in rig.started[1:])
    assert len(rig.released) == len(rig.started) - 1 > 0
