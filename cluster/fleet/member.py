"""A rank's place in its group: who is in it now, whether he is of use, and how he is ended."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray

from actors.channels.neighbour import end
from actors.ranks.remote import RayRank
from cluster.fleet.nodes import Node, Placed
from contracts.logs import event
from contracts.worker import RankReady, RankStatus, WorkerSpec

log = logging.getLogger("tandem.fleet")

CHECK_PERIOD_S = 0.25
HUNG_AFTER_S = 3.0  # without an answer to `status`, which nothing that the rank does holds up


class Place(NamedTuple):
    """A bundle of a placement group, where a rank's process runs."""

    placed: Placed
    bundle: int

    def start(self) -> RayRank:
        """As `Placed.start`."""
        return self.placed.start(self.bundle)

    @property
    def node(self) -> Node:
        return self.placed.node(self.bundle)

    @property
    def is_its_own(self) -> bool:
        """Whether nobody else is placed with it: Ray takes no bundle out of a placement group."""
        return len(self.placed.requests) == 1

    @property
    def needs(self) -> dict[str, float]:
        """Ray resources."""
        return self.placed.requests[self.bundle].resources


class Member:
    """replaced_for: why whoever is in it is being replaced; empty: he is not. status: what he has
    said of himself last, if he has said anything."""

    def __init__(self, spec: WorkerSpec, place: Place, handle: RayRank, ready: RankReady) -> None:
        self.place = place
        self.settle(spec, handle, ready)

    def settle(self, spec: WorkerSpec, handle: RayRank, ready: RankReady) -> None:
        """Puts another process in this place."""
        self.spec, self.handle, self.ready = spec, handle, ready
        self.replaced_for = ""
        self.status: RankStatus | None = None
        self._problem = ""
        self._asked: Future[RankStatus] | None = None
        self._asked_s = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_up(self) -> bool:
        """Whether it was of use when it was last checked."""
        return not self.replaced_for and not self._problem

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Of whoever is in it now."""
        return self.handle.call(method, *arguments)

    def check(self, now_s: float, stalled_s: float) -> str:
        """Why the rank is of no use, as far as is known; empty: it is of use. To be called every
        CHECK_PERIOD_S or so, from one thread. stalled_s: how long the caller itself stood still
        since the last time."""
        if self._asked is None:
            self._asked, self._asked_s = self.handle.call("status"), now_s
        elif not self._asked.done():
            self._asked_s += stalled_s
            silent_s = now_s - self._asked_s
            if silent_s > HUNG_AFTER_S:
                self._problem = f"no answer for {silent_s:.1f} s"
        else:
            asked, self._asked = self._asked, None
            self._problem = _problem(asked)
            if asked.exception() is None:
                self.status = asked.result()
        return self._problem

    def kill(self) -> None:
        """Ray lets a process that hangs have five seconds to end by itself; one of this machine
        need not."""
        try:
            if not end(self.ready.whereabouts):
                event(log, "worker_not_here", name=self.name)
        except OSError as error:
            event(log, "worker_not_killed", name=self.name, error=error)
        ray.kill(self.handle.actor)


def _problem(asked: Future[RankStatus]) -> str:
    error = asked.exception()
    if error is not None:
        return str(error) or type(error).__name__
    status = asked.result()
    return "" if status.healthy else status.reason or "not healthy"
