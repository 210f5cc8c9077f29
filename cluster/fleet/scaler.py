"""More prefill workers while they are full, and fewer again: what `planner/policies/scaling.py`
decides, done.

start ── room for one more ─ prepare ─ start ─> in the directory: routers find it
end   ── out of the directory ─> routers send it nothing more ─ it answers what it has ─> stopped

A router that has not looked yet sends to a worker that ends: it sees its connection close, and the
request goes to another, as after a loss. One step at a time, on a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec
import ray
from ray.exceptions import RayError

from actors.ranks.rendezvous import form_group
from cluster.fleet.member import Member, Place
from cluster.fleet.nodes import Placed, RankRequest, place_ranks
from cluster.fleet.rank_group import RankGroup, kill_all
from contracts.config import TandemConfig
from contracts.errors import LaunchError, TandemError
from contracts.logs import event
from contracts.worker import Group, RankStatus
from planner.policies.scaling import FillScaling

log = logging.getLogger("tandem.fleet")

LOOK_PERIOD_S = 0.5
TOLD_S = 3.0  # until every router has looked into the directory (finder.FOLLOW_PERIOD_S)
ANSWER_S = 5.0


class Scaler:
    """Of one group of prefill workers, from `start` to `close`."""

    def __init__(self, group: RankGroup, config: TandemConfig) -> None:
        self._group, self._config = group, config
        self._policy = FillScaling(config.scaling, config.groups.prefill_ranks)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def look(self, now_s: float) -> None:
        """Once: takes at most one step, which may take minutes."""
        members = list(self._group.members)
        fills = [fill_of(member.status) for member in members]
        known = [fill for fill in fills if fill is not None]
        is_steady = len(known) == len(members) and not any(one.replaced_for for one in members)
        step = self._policy.step(now_s, known, is_steady=is_steady)
        if step > 0:
            self._add(len(members))
        elif step < 0:
            self._end(members[-1])

    def _run(self) -> None:
        while not self._closing.wait(LOOK_PERIOD_S):
            try:
                self.look(time.monotonic())
            except (TandemError, RayError, FutureTimeoutError, CancelledError) as error:
                event(log, "prefill_not_scaled", logging.ERROR, error=error)
                self._closing.wait(self._config.scaling.window_s)

    def _add(self, workers: int) -> None:
        """Raises what keeps it from starting; it has no room then."""
        event(log, "prefill_grows", workers=workers, fill=round(self._policy.fill, 2))
        group, started_s = self._group, time.monotonic()
        first = group.members[0]
        needs = first.place.needs
        request = RankRequest(Group.PREFILL, workers, dict(needs))
        beside = first.place.placed
        placed = place_ranks([request], self._config, beside.device, beside.application)
        try:
            member = self._started(placed, first, workers)
        except BaseException:
            placed.release()
            raise
        if self._closing.is_set():
            kill_all([member.handle])
            placed.release()
            return
        group.join(member)
        seconds = round(time.monotonic() - started_s, 1)
        event(log, "worker_added", name=member.name, epoch=member.spec.epoch, seconds=seconds)

    def _started(self, placed: Placed, first: Member, rank: int) -> Member:
        place = Place(placed, 0)
        spec = msgspec.structs.replace(
            first.spec,
            rank=rank,
            epoch=self._group.next_epoch(),
            host=place.node.listen_host,
            # Of the memory that is left, an equal part for each that may still come.
            ranks_on_node=self._config.prefill_slots - rank,
        )
        handle = place.start()
        timeout_s = self._config.groups.ready_timeout_s
        try:
            handle.started().result(timeout_s)
            (ready,) = form_group([spec], [handle], timeout_s=timeout_s)
        except BaseException as error:
            kill_all([handle])
            if isinstance(error, FutureTimeoutError):
                raise LaunchError(f"{spec.name} did not start within {timeout_s:g} s") from None
            raise
        return Member(spec, place, handle, ready)

    def _end(self, member: Member) -> None:
        """It may go on answering for http.request_timeout_s; nobody waits for an answer longer."""
        event(log, "prefill_shrinks", name=member.name, fill=round(self._policy.fill, 2))
        self._group.leave(member)
        started_s = time.monotonic()
        self._wait_idle(member, started_s)
        seconds = round(time.monotonic() - started_s, 1)
        try:
            member.handle.call("stop").result(ANSWER_S)
        except (TandemError, RayError, FutureTimeoutError) as error:
            event(log, "rank_stop_failed", logging.WARNING, name=member.name, error=error)
        ray.kill(member.handle.actor)
        member.place.placed.release()
        event(log, "worker_ended", name=member.name, seconds=seconds)

    def _wait_idle(self, member: Member, since_s: float) -> None:
        """Until it has nothing open and everybody has been told; it may be lost meanwhile."""
        last_s = since_s + self._config.http.request_timeout_s
        while not self._closing.wait(LOOK_PERIOD_S) and time.monotonic() < last_s:
            try:
                status: RankStatus = member.handle.call("status").result(ANSWER_S)
            except (TandemError, RayError, FutureTimeoutError):
                return
            is_idle = status.running == status.waiting == 0
            if is_idle and time.monotonic() >= since_s + TOLD_S:
                return


def fill_of(status: RankStatus | None) -> float | None:
    """Work of a worker's open requests over its saturation threshold. None: it has not said."""
    work = status.sections.get("work") if status is not None else None
    return work["load"] / work["saturation"] if work and work.get("saturation") else None
