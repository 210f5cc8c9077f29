"""Ranks that a launcher starts, notifies and ends, without Ray."""

from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from typing import Any

import pytest
import ray

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec
from cluster.fleet import membership
from cluster.fleet.launch import launch_pipeline
from cluster.fleet.nodes import Node, RankPlacement, RankRequest, seat_ranks
from cluster.fleet.rank_group import Member, RankBundle, RankGroup
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.ranks import DRAINED, Group, RankReady, RankSpec, RankStatus, rank_name

NODE = Node("a", "10.0.0.1", "10.0.0.1")
SATURATION = 1000.0
CPU = 0.5  # of each rank of `launch`


class StartedRank(RayRank):
    """A rank process without Ray, which answers every call at once.

    calls: method and arguments, in order. answers: by method, in place of the usual answer: a
    result, an error, a future, or a function of the arguments that returns one of them. ends:
    "stop, N open" and "killed". lost, load: as `status` reports them; SATURATION is the threshold
    of load. open: number of status reports with open requests. hangs, dies: from `leave` on.
    """

    def __init__(self, name: str, key: str = "", spec: RankSpec | None = None) -> None:
        super().__init__(name, self, key)
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.ends: list[str] = []
        self.hangs = self.dies = False
        self.load: float | None = None
        self.lost: dict[str, float] = {}
        self.open = 0
        self.spec: Any = spec

    def started(self) -> Future[Any]:
        return done(None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append((method, *arguments))
        leaves = bool(self.calls_of("drain"))
        if leaves and self.hangs:
            return Future()
        if leaves and self.dies:
            return done(self.death)
        if method == "prepare":
            (self.spec,) = arguments
        if method == "stop":
            self.ends.append(f"stop, {self.open} open")
        if method in self.answers:
            answer = self.answers[method]
            return done(answer(*arguments) if callable(answer) else answer)
        if method == "prepare":
            return done(self.ready)
        if method == "status":
            return done(self._status(leaves))
        if method == "identity":
            return done((self.spec.name, self.spec.epoch, sha256(self.spec.token).digest()))
        return done(None)

    def calls_of(self, method: str) -> list[list[Any]]:
        return [arguments for name, *arguments in self.calls if name == method]

    @property
    def ready(self) -> RankReady:
        """The answer to `prepare`."""
        at = f"tcp:{self.name}:{self.spec.epoch}"
        has_clients = self.spec.group in (Group.ATTENTION, Group.PREFILL)
        return RankReady(
            name=self.name, pid=id(self), channel_address=at, client_address=at * has_clients
        )

    @property
    def death(self) -> LaunchError:
        return LaunchError(f"{self.name}: its actor died")

    def _status(self, leaves: bool) -> RankStatus:
        self.open = max(0, self.open - 1)
        sections: dict[str, Any] = {"lost": dict(self.lost)} if self.lost else {}
        if self.load is not None:
            sections["work"] = {"load": self.load, "saturation": SATURATION}
        return RankStatus(
            name=self.name,
            healthy=True,
            running=int(self.open > 0),
            sections=sections,
            notes={"leaving": DRAINED} if leaves and not self.open else {},
        )


def done(answer: Any) -> Future[Any]:
    """Return a future with that result or error; a future is returned as it is."""
    if isinstance(answer, Future):
        return answer
    future: Future[Any] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


def started_member(spec: RankSpec, place: RankBundle | None = None, key: str = "") -> Member:
    """Return a member whose process is a `StartedRank`."""
    rank = StartedRank(spec.name, key, spec)
    return Member(
        spec, place or RankBundle(RankPlacement([], None, "cpu", []), 0), rank, rank.ready
    )


def rank_of(member: Member) -> StartedRank:
    assert isinstance(member.handle, StartedRank)
    return member.handle


class StartedRanks:
    """Launcher without Ray.

    started, ended_ranks: all so far, in order. released: names of the ranks of each placement that
    was released. next: called with each rank that starts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[StartedRank] = []
        self.ended_ranks: list[StartedRank] = []
        self.released: list[list[str]] = []
        self.has_no_room = False
        self.next: Callable[[StartedRank], None] = lambda rank: None
        monkeypatch.setattr(ray, "kill", self._kill)
        monkeypatch.setattr(membership, "place_ranks", self.place)
        monkeypatch.setattr(membership, "POLL_PERIOD_S", 0.001)
        monkeypatch.setattr(membership, "PROPAGATION_S", 0.01)

    def launch(self, config: TandemConfig, *kinds: Group, **group_spec: Any) -> RankGroup:
        """Launch a group with one rank of each kind named, each with CPU."""
        numbers = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        needs = {"CPU": CPU}
        requests = [RankRequest(*each, needs) for each in zip(kinds, numbers, strict=True)]
        made = GroupSpec(config, "", b"", 1, **{"backend": "shm", **group_spec})
        placed = self.place(requests)
        (group,) = launch_pipeline(made, placed, *seat_ranks([placed], config))
        return group

    def place(self, requests: list[RankRequest], *_: Any, **__: Any) -> RankPlacement:
        if self.has_no_room:
            raise ResourceError("1 ranks could not be placed within 3 s")
        placed = _Room(requests, None, "cpu", [NODE] * len(requests))
        placed.ranks = self
        return placed

    def rank(self, name: str) -> StartedRank:
        """Return the last rank with that name."""
        return next(rank for rank in reversed(self.started) if rank.name == name)

    def _kill(self, rank: StartedRank) -> None:
        rank.ends.append("killed")
        self.ended_ranks.append(rank)


class _Room(RankPlacement):
    ranks: StartedRanks

    def start(self, bundle: int) -> StartedRank:
        request = self.requests[bundle]
        rank = StartedRank(rank_name(request.group, request.rank))
        self.ranks.next(rank)
        self.ranks.started.append(rank)
        return rank

    def node(self, bundle: int) -> Node:
        return NODE

    @property
    def is_complete(self) -> bool:
        return True

    def release(self) -> None:
        self.ranks.released.append([rank_name(one.group, one.rank) for one in self.requests])
