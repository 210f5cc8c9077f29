"""A rank's place in its group: who is in it now, whether he is of use, and how he is ended."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray

from actors.channels.local_process import kill_process
from actors.ranks.remote import RayRank
from cluster.fleet.nodes import Node, RankPlacement
from contracts.logs import event
from contracts.ranks import RankReady, RankSpec, RankStatus

log = logging.getLogger("tandem.fleet")

CHECK_PERIOD_S = 0.25
HUNG_AFTER_S = 3.0  # without an answer to `status`, which nothing that the rank does holds up


class RankBundle(NamedTuple):
    """A bundle of a placement group, where a rank's process runs."""

    placed: RankPlacement
    bundle: int

    def start(self) -> RayRank:
        """As `RankPlacement.start`."""
        return self.placed.start(self.bundle)

    @property
    def node(self) -> Node:
        return self.placed.node(self.bundle)

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else is placed with it: Ray takes no bundle out of a placement group."""
        return len(self.placed.requests) == 1

    @property
    def needs(self) -> dict[str, float]:
        """Ray resources."""
        return self.placed.requests[self.bundle].resources


class Member:
    """replaced_for: why whoever is in it is being replaced; empty: he is not. status: what he has
    said of himself last, if he has said anything."""

    def __init__(
        self, spec: RankSpec, place: RankBundle, handle: RayRank, ready: RankReady
    ) -> None:
        self.place = place
        self.assign(spec, handle, ready)

    def assign(self, spec: RankSpec, handle: RayRank, ready: RankReady) -> None:
        """Puts another process in this place."""
        self.spec, self.handle, self.ready = spec, handle, ready
        self.replacement_reason = ""
        self.status: RankStatus | None = None
        self._problem = ""
        self._status_call: Future[RankStatus] | None = None
        self._status_called_s = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_up(self) -> bool:
        """Whether it was of use when it was last checked."""
        return not self.replacement_reason and not self._problem

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Of whoever is in it now."""
        return self.handle.call(method, *arguments)

    def check(self, now_s: float, stalled_s: float) -> str:
        """Why the rank is of no use, as far as is known; empty: it is of use. To be called every
        CHECK_PERIOD_S or so, from one thread. stalled_s: how long the caller itself stood still
        since the last time."""
        if self._status_call is None:
            self._status_call, self._status_called_s = self.handle.call("status"), now_s
        elif not self._status_call.done():
            self._status_called_s += stalled_s
            silent_s = now_s - self._status_called_s
            if silent_s > HUNG_AFTER_S:
                self._problem = f"no answer for {silent_s:.1f} s"
        else:
            reply, self._status_call = self._status_call, None
            self._problem = _problem(reply)
            if reply.exception() is None:
                self.status = reply.result()
        return self._problem

    def kill(self) -> None:
        """Ray lets a process that hangs have five seconds to end by itself; one of this machine
        need not."""
        try:
            if not kill_process(self.ready.process_identity):
                event(log, "worker_process_not_found", name=self.name)
        except OSError as error:
            event(log, "worker_kill_failed", name=self.name, error=error)
        ray.kill(self.handle.actor)


def _problem(reply: Future[RankStatus]) -> str:
    error = reply.exception()
    if error is not None:
        return str(error) or type(error).__name__
    status = reply.result()
    return "" if status.healthy else status.reason or "not healthy"
