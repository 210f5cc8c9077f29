"""A rank's place in its group: the process in it, its health and its end."""

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
HUNG_AFTER_S = 3.0  # without a reply to `status`, which is independent of the rank's loop


class RankBundle(NamedTuple):
    """A bundle of a placement group, where a rank's process runs."""

    placed: RankPlacement
    bundle: int

    def start(self) -> RayRank:
        """Start the process. See `RankPlacement.start`."""
        return self.placed.start(self.bundle)

    @property
    def node(self) -> Node:
        return self.placed.node(self.bundle)

    @property
    def is_exclusive(self) -> bool:
        """True if the placement group has no other bundle. Ray cannot release a single bundle."""
        return len(self.placed.requests) == 1

    @property
    def needs(self) -> dict[str, float]:
        """Ray resources of the rank."""
        return self.placed.requests[self.bundle].resources


class Member:
    """A rank. replacement_reason: set while it is being replaced. status: the last one received."""

    def __init__(
        self, spec: RankSpec, place: RankBundle, handle: RayRank, ready: RankReady
    ) -> None:
        self.place = place
        self.assign(spec, handle, ready)

    def assign(self, spec: RankSpec, handle: RayRank, ready: RankReady) -> None:
        """Assign a new process to this place."""
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
        """True if the last check found no problem."""
        return not self.replacement_reason and not self._problem

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the current process."""
        return self.handle.call(method, *arguments)

    def check(self, now_s: float, stalled_s: float) -> str:
        """Return the rank's problem, or an empty string.

        Called about every CHECK_PERIOD_S from one thread. stalled_s: time the caller itself was
        stalled
        since the last call.
        """
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
        """Kill the process.

        Ray gives a hung process five seconds; a local one is killed at once.
        """
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
