"""When prefill workers are lost: who starts again, under which epoch, and who is told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import ray

import cluster.fleet.supervisor
from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec
from cluster.fleet.fleet import Fleet
from cluster.fleet.launch import launch_pipeline
from cluster.fleet.nodes import Node, RankPlacement, RankRequest
from contracts.errors import ChannelError, LaunchError
from contracts.loading import config_from
from contracts.ranks import Group, RankReady, RankStatus


class FakeRank(RayRank):
    """Does at once what it is told. calls: what that was. dead: it answers `status` so."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.dead = False
        self.unreached = ""
        self.hold: Future[Any] | None = None  # of its `prepare`

    def started(self) -> Future[Any]:
        return done(None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append((method, arguments))
        if method == "status":
            return done(RankStatus(name=self.name, healthy=not self.dead, reason="it broke"))
        if method == "connect" and self.unreached:
            return failed(ChannelError(f"cannot join {self.unreached}"))
        if method != "prepare":
            return done(None)
        (spec,) = arguments
        address = f"tcp:{self.name}:{spec.epoch}"
        ready = RankReady(name=self.name, pid=1, channel_address=address, client_address=address)
        return done(ready) if self.hold is None else after(self.hold, ready)

    def received(self, method: str) -> list[Any]:
        return [arguments[0] for called, arguments in self.calls if called == method and arguments]


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def after(first: Future[Any], result: Any) -> Future[Any]:
    """The result once `first` is done, or its error."""
    future: Future[Any] = Future()

    def assign(_: Future[Any]) -> None:
        error = first.exception()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    first.add_done_callback(assign)
    return future


NODE = Node("a", "10.0.0.1", "10.0.0.1")


class FakePlaced(RankPlacement):
    """Room on one node. Ranks are made by the rig."""

    rig: Rig

    def start(self, bundle: int) -> FakeRank:
        return self.rig.start(f"prefill-{bundle}")

    def node(self, bundle: int) -> Node:
        return NODE

    def release(self) -> None:
        pass


class Rig:
    """A group of three, without Ray. started, killed: all that have been, in order. hold: `prepare`
    of the next one of a name waits for it. unreached: whom the next one of a name cannot join."""

    def __init__(self, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeRank] = []
        self.hold: dict[str, Future[Any]] = {}
        self.unreached: dict[str, str] = {}
        self.killed: list[Any] = []
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(cluster.fleet.supervisor, "RETRY_S", 0.01)
        config = config_from(
            {
                "groups": {"attention_ranks": 0, "expert_ranks": 0, "prefill_ranks": 3},
                "prefill": {"experts": experts},
            },
            source="test",
        )
        requests = [RankRequest(Group.PREFILL, rank, {}) for rank in range(3)]
        placed = FakePlaced(requests, None, "cpu", [NODE] * 3)
        placed.rig = self
        (self.group,) = launch_pipeline(GroupSpec(config, "", b"", 1, "auto"), placed, Counter())
        self.fleet = Fleet(b"", [self.group])

    def start(self, name: str) -> FakeRank:
        rank = FakeRank(name)
        rank.hold = self.hold.pop(rank.name, None)
        rank.unreached = self.unreached.pop(rank.name, "")
        self.started.append(rank)
        return rank

    def wait(self, true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 20.0
        while not true():
            assert time.monotonic() < end_s
            time.sleep(0.005)


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(request.param, monkeypatch)
    yield made
    made.fleet.close()


@pytest.mark.parametrize("rig", ["gathered"], indirect=True)
def test_lost_members_are_skipped_and_introduced_when_replaced(rig: Rig) -> None:
    """FINDINGS B2: a new worker dialled the lost ones, for ten seconds each."""
    late: Future[None] = Future()
    rig.hold["prefill-1"] = late
    rig.started[1].dead = True
    rig.wait(lambda: len(rig.started) == 4)
    rig.started[0].dead = True
    rig.wait(lambda: rig.group.restarts == 1)
    fresh = rig.started[4]
    assert fresh.name == "prefill-0"
    assert fresh.received("connect")[0].keys() == {"prefill-0", "prefill-2"}
    late.set_result(None)
    rig.wait(lambda: rig.group.restarts == 2)
    addresses = rig.group.client_addresses
    waiting = (fresh, rig.started[2], rig.started[3])
    rig.wait(lambda: all(rank.received("connect")[-1:] == [addresses] for rank in waiting))


@pytest.mark.parametrize("rig", ["all_to_all"], indirect=True)
def test_workers_in_lockstep_are_replaced_together_under_one_epoch(rig: Rig) -> None:
    """FINDINGS B13: each under its own, so that they could never join again."""
    rig.started[1].dead = True
    rig.wait(lambda: rig.group.restarts == 3)
    fresh = rig.started[3:]
    assert [rank.name for rank in fresh] == ["prefill-0", "prefill-1", "prefill-2"]
    assert {spec.epoch for rank in fresh for spec in rank.received("prepare")} == {2}
    for rank in fresh:
        assert rank.received("connect") == [
            {f"prefill-{i}": f"tcp:prefill-{i}:2" for i in range(3)}
        ]
    assert rig.group.epoch == 2


@pytest.mark.parametrize(("rig", "count"), [("gathered", 1), ("all_to_all", 6)], indirect=["rig"])
def test_one_that_cannot_reach_another_goes_without_it_but_in_lockstep(
    rig: Rig, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ranks.rendezvous.REACH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("actors.ranks.rendezvous.DEGRADED_REACH_TIMEOUT_S", 0.0)
    rig.unreached["prefill-1"] = "prefill-2"
    rig.started[1].dead = True
    rig.wait(lambda: rig.group.restarts > 0)
    assert len(rig.started[3:]) == count


@pytest.mark.parametrize("rig", ["gathered"], indirect=True)
def test_one_that_is_lost_costs_the_others_nothing(rig: Rig) -> None:
    rig.started[2].dead = True
    rig.wait(lambda: rig.group.restarts == 1)
    assert [rank.name for rank in rig.started[3:]] == ["prefill-2"]
    assert not rig.started[0].received("prepare")[1:]


@pytest.mark.parametrize("rig", ["gathered"], indirect=True)
def test_when_the_next_one_is_lost_while_it_loads_another_takes_the_place(rig: Rig) -> None:
    """Under a later epoch: the one between is gone for good, and nobody was ever told of it."""
    lost_too: Future[None] = Future()
    rig.hold["prefill-1"] = lost_too
    rig.started[1].dead = True
    rig.wait(lambda: len(rig.started) == 4 and bool(rig.started[3].received("prepare")))
    lost_too.set_exception(LaunchError("prefill-1: its actor died"))
    rig.wait(lambda: rig.group.restarts == 1)
    between, fresh = rig.started[3:]
    assert rig.killed == [rig.started[1].actor, between.actor]
    assert [spec.epoch for rank in (between, fresh) for spec in rank.received("prepare")] == [2, 3]
    assert rig.group.client_addresses["prefill-1"] == "tcp:prefill-1:3"
    others = (rig.started[0], rig.started[2])
    rig.wait(lambda: all(rank.received("connect")[1:] for rank in others))
    for rank in others:
        assert {received["prefill-1"] for received in rank.received("connect")[1:]} == {
            "tcp:prefill-1:3"
        }
