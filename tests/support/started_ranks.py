"""What a launcher starts, tells and ends, without Ray: processes that answer at once, or as they
are told to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from actors.ranks.remote import RayRank
from cluster.fleet import membership
from cluster.fleet.nodes import Node, RankPlacement, RankRequest
from contracts.errors import LaunchError, ResourceError
from contracts.ranks import DRAINED, Group, RankReady, RankStatus, rank_name

NODE = Node("a", "10.0.0.1", "10.0.0.1")
SATURATION = 1000.0


class StartedRank(RayRank):
    """told: all calls. ends: "stop, ... open", "killed". load: of its open requests, with a
    threshold of SATURATION; None: it says nothing of that. open: how often it still says that it
    has some. fails: `prepare` does. hold: `prepare` waits for it. hangs: nothing is answered, once
    it is to leave; dies: nor then, for its actor is gone."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.calls: list[tuple[Any, ...]] = []
        self.ends: list[str] = []
        self.fails = self.hangs = self.dies = False
        self.hold: Future[Any] | None = None
        self.load: float | None = None
        self.open = 0
        self.spec: Any = None

    def started(self) -> Future[Any]:
        return done(None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append((method, *arguments))
        leaves = bool(self.calls_of("leave"))
        if leaves and self.hangs:
            return Future()
        if (leaves and self.dies) or (method == "prepare" and self.fails):
            failed: Future[Any] = Future()
            failed.set_exception(LaunchError(f"{self.name}: its actor died"))
            return failed
        if method == "prepare":
            return self._prepared(arguments[0])
        if method == "status":
            return done(self._status(leaves))
        if method == "stop":
            self.ends.append(f"stop, {self.open} open")
        return done(None)

    def calls_of(self, method: str) -> list[list[Any]]:
        return [arguments for name, *arguments in self.calls if name == method]

    def _prepared(self, spec: Any) -> Future[Any]:
        self.spec = spec
        at = f"tcp:{self.name}:{spec.epoch}"
        is_asked = spec.group in (Group.ATTENTION, Group.PREFILL)
        ready = RankReady(
            name=self.name, pid=id(self), channel_address=at, client_address=at * is_asked
        )
        return done(ready) if self.hold is None else self.hold

    def _status(self, leaves: bool) -> RankStatus:
        self.open = max(0, self.open - 1)
        work = None if self.load is None else {"load": self.load, "saturation": SATURATION}
        return RankStatus(
            name=self.name,
            healthy=True,
            running=int(self.open > 0),
            sections={} if work is None else {"work": work},
            notes={"leaving": DRAINED} if leaves and not self.open else {},
        )


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class StartedRanks:
    """started: in order. ended: by the launcher. released: names of the ranks of each room that was
    given back. next: what is done to a rank that starts."""

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

    def place(self, requests: list[RankRequest], *_: Any, **__: Any) -> RankPlacement:
        if self.has_no_room:
            raise ResourceError("1 ranks could not be placed within 3 s")
        placed = _Room(requests, None, "cpu", [NODE] * len(requests))
        placed.ranks = self
        return placed

    def rank(self, name: str) -> StartedRank:
        """Whoever has come last by that name."""
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
