"""Prefill workers that come and go, without Ray: who is in the directory when, and who is ended."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import Formation
from cluster.fleet import growth, scaler
from cluster.fleet.launch import launch_pipeline
from cluster.fleet.nodes import Node, Placed, RankRequest
from cluster.fleet.scaler import Scaler
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.loading import config_from
from contracts.worker import LEFT, Group, RankReady, RankStatus

FULL, EMPTY = 900.0, 0.0  # of a threshold of 1,000
NODE = Node("a", "10.0.0.1", "10.0.0.1")


class FakeRank(RayRank):
    """load: of its open requests. open: how often it still says that it has some. fails: `prepare`
    does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.load, self.open = FULL, 0
        self.fails = self.leaves = False
        self.epoch = 0
        self.ends: list[str] = []

    def started(self) -> Future[Any]:
        return done(None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "prepare":
            if self.fails:
                failed: Future[Any] = Future()
                failed.set_exception(LaunchError(f"{self.name}: no memory"))
                return failed
            self.epoch = arguments[0].epoch
            at = f"tcp:{self.name}:{self.epoch}"
            return done(RankReady(name=self.name, pid=1, channel_address="", client_address=at))
        if method == "status":
            self.open = max(0, self.open - 1)
            work = {"work": {"load": self.load, "saturation": 1000.0}}
            running = int(self.open > 0)
            notes = {"leaving": LEFT} if self.leaves and not self.open else {}
            return done(
                RankStatus(
                    name=self.name, healthy=True, running=running, sections=work, notes=notes
                )
            )
        if method == "leave":
            self.leaves = True
        if method == "stop":
            self.ends.append(f"stop, {self.open} open")
        return done(None)


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class FakePlaced(Placed):
    rig: Rig

    def start(self, bundle: int) -> FakeRank:
        rank = FakeRank(f"prefill-{self.requests[bundle].rank}")
        rank.fails = self.rig.next_fails
        self.rig.ranks.append(rank)
        return rank

    def node(self, bundle: int) -> Node:
        return NODE

    def release(self) -> None:
        self.rig.released += len(self.requests)


class Rig:
    """One worker, three at most. second: takes a look, all that are there having said how full
    they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[FakeRank] = []
        self.released = 0
        self.next_fails = self.has_no_room = False
        self.now_s = 0.0
        monkeypatch.setattr(ray, "kill", lambda actor: actor.ends.append("killed"))
        monkeypatch.setattr(growth, "place_ranks", self.place)
        for module in (growth, scaler):
            monkeypatch.setattr(module, "LOOK_PERIOD_S", 0.001)
        monkeypatch.setattr(growth, "TOLD_S", 0.01)
        self.config = config_from(
            {
                "groups": {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": 1},
                "scaling": {"max_prefill_ranks": 3, "window_s": 2, "idle_s": 5},
            },
            source="test",
        )
        placed = self.place([RankRequest(Group.PREFILL, 0, {})], self.config, "cpu")
        formation = Formation(self.config, "", b"", 1, "auto")
        (self.group,) = launch_pipeline(formation, placed, Counter())
        self.scaler = Scaler(self.group, self.config)

    def place(
        self,
        requests: list[RankRequest],
        config: TandemConfig,
        device: str,
        application: str = "",
        *,
        beside: str | None = None,
    ) -> Placed:
        if self.has_no_room:
            raise ResourceError("1 ranks could not be placed")
        placed = FakePlaced(requests, None, device, [NODE])
        placed.rig = self
        return placed

    def second(self, count: int = 1) -> list[str]:
        """Who is in the directory then."""
        for _ in range(count):
            self.now_s += 1.0
            for member in self.group.members:
                for _ in range(2):  # asked, then heard
                    member.check(self.now_s, 0.0)
            self.scaler.look(self.now_s)
        return list(self.group.client_addresses)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_full_workers_get_more_and_idle_ones_go_again_the_last_first(rig: Rig) -> None:
    assert rig.second(1) == ["prefill-0"]
    assert rig.second(20) == ["prefill-0", "prefill-1", "prefill-2"]
    assert [rank.epoch for rank in rig.ranks] == [1, 2, 3]
    for rank in rig.ranks:
        rank.load = EMPTY
    assert rig.second(60) == ["prefill-0"]
    assert [rank.ends for rank in rig.ranks] == [[], *[["stop, 0 open", "killed"]] * 2]
    assert rig.released == 2, "their room is free again"
    rig.ranks[0].load = FULL
    assert rig.second(5) == ["prefill-0", "prefill-1"]
    assert rig.ranks[-1].epoch == 4, "another one than the last of this number"


def test_one_that_goes_answers_what_it_has_first(rig: Rig) -> None:
    rig.second(20)
    for rank in rig.ranks:
        rank.load, rank.open = EMPTY, 500
    rig.second(20)
    assert rig.ranks[2].ends == ["stop, 0 open", "killed"]


def test_one_that_cannot_start_leaves_nothing_and_is_tried_again(rig: Rig) -> None:
    rig.next_fails = True
    with pytest.raises(LaunchError, match="no memory"):
        rig.second(10)
    assert rig.ranks[1].ends == ["killed"]
    assert rig.released == 1
    rig.next_fails, rig.has_no_room = False, True
    with pytest.raises(ResourceError):
        rig.second(10)
    rig.has_no_room = False
    assert rig.second(10)[:2] == ["prefill-0", "prefill-1"]


def test_nothing_is_done_while_one_is_being_replaced(rig: Rig) -> None:
    rig.group.members[0].replaced_for = "it hung"
    assert rig.second(50) == ["prefill-0"]


def test_one_that_comes_while_all_end_is_ended_too(rig: Rig) -> None:
    closing: threading.Event = rig.scaler._closing
    closing.set()
    assert rig.second(10) == ["prefill-0"]
    assert all(rank.ends == ["killed"] for rank in rig.ranks[1:])
    assert rig.released == len(rig.ranks) - 1 > 0
