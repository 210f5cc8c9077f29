"""Addition and removal of a single rank of a running group.

add    ── place ─ prepare ─ connect to the others ─ start ─> member: in the directory, supervised
remove ── out of the directory ─> no new requests ─ open ones are completed or resumed elsewhere
          ─> stopped; its placement is released

A rank of the launch shares its placement group, and Ray cannot release a single bundle. Its place
is kept for the next rank with its number.

The autoscaler changes the number of prefill workers by load: it executes the decisions of
`planner/scheduling/prefill_scaling.py`, one step at a time, on a separate thread. A router that has
not yet seen the removal of a worker loses its connection and retries elsewhere.
"""

import logging
import threading
import time
from concurrent.futures import CancelledError

import msgspec
import ray
from ray.exceptions import RayError

from actors.ranks.rendezvous import form_group
from cluster.fleet.nodes import RankRequest, place_ranks
from cluster.fleet.rank_group import Member, RankBundle, RankGroup, kill_all
from contracts.config import TandemConfig
from contracts.errors import LaunchError, TandemError
from contracts.logs import event
from contracts.ranks import DRAINED, Group, RankStatus, rank_name
from planner.scheduling.prefill_scaling import UtilizationScaling

log = logging.getLogger("tandem.fleet")

POLL_PERIOD_S = 0.5
PROPAGATION_S = 3.0  # until every router has read the directory (rank_set.POLL_PERIOD_S)
REPLY_TIMEOUT_S = 5.0
LATE_S = 5.0  # grace period for a rank in a long step
ON_ONE_NODE = ("shm", "ipc")


def add_member(
    group: RankGroup,
    kind: Group,
    rank: int,
    config: TandemConfig,
    *,
    share: int,
    closing: threading.Event,
) -> float | None:
    """Start a rank of an existing kind and add it to the directory.

    share: number of ranks that divide the remaining memory. Returns the seconds it took, or None if
    the server is closing; the rank is killed then. Raises the error that prevents its start; its
    placement is released then.
    """
    started_s = time.monotonic()
    first = next(member for member in group.members if member.spec.group is kind)
    place = find_kept_place(group, kind, rank) or _new_place(first, rank, config)
    try:
        member = _start_rank(group, first, place, rank, config, share)
    except BaseException:
        release_place(place)
        raise
    if closing.is_set():
        kill_all([member.handle])
        release_place(member.place)
        return None
    group.join(member)
    seconds = round(time.monotonic() - started_s, 1)
    event(log, "worker_added", name=member.name, epoch=member.spec.epoch, seconds=seconds)
    return seconds


def find_kept_place(group: RankGroup, kind: Group, rank: int) -> RankBundle | None:
    """Return the kept place of a removed rank of the launch."""
    present = (*group.members, *group.draining)
    taken = {(id(one.place.placed), one.place.bundle) for one in present}
    for placed in {id(one.place.placed): one.place.placed for one in group.members}.values():
        for bundle, request in enumerate(placed.requests):
            is_its = (request.group, request.rank) == (kind, rank)
            if is_its and (id(placed), bundle) not in taken:
                return RankBundle(placed, bundle)
    return None


def release_place(place: RankBundle) -> None:
    """Release a placement group of its own; a shared one is kept."""
    if place.is_exclusive:
        place.placed.release()


def _new_place(first: Member, rank: int, config: TandemConfig) -> RankBundle:
    request = RankRequest(first.spec.group, rank, dict(first.place.needs))
    beside = first.place.placed
    is_joined = first.spec.group is not Group.PREFILL and first.spec.backend in ON_ONE_NODE
    host = first.place.node.host if is_joined else ""
    placed = place_ranks([request], config, beside.device, beside.application, beside=host)
    return RankBundle(placed, 0)


def _start_rank(
    group: RankGroup, first: Member, place: RankBundle, rank: int, config: TandemConfig, share: int
) -> Member:
    timeout_s, name = config.groups.ready_timeout_s, rank_name(first.spec.group, rank)
    handle = place.start()
    try:
        handle.started().result(timeout_s)
        spec = msgspec.structs.replace(
            first.spec,
            rank=rank,
            epoch=group.next_epoch(),
            host=place.node.listen_host,
            ranks_on_node=share,
            core_share=(0, 0),
        )
        alone = spec.group is Group.PREFILL  # it needs no peers
        (ready,) = form_group(
            [spec],
            [handle],
            timeout_s=timeout_s,
            others=lambda: [] if alone else [one.ready for one in group.working],
        )
    except BaseException as error:
        kill_all([handle])
        if isinstance(error, TimeoutError):
            raise LaunchError(f"{name} did not start within {timeout_s:g} s") from None
        raise
    return Member(spec, place, handle, ready)


def remove_member(
    group: RankGroup, member: Member, within_s: float, closing: threading.Event
) -> None:
    """Drain the rank within `timeout_s` and stop it. closing: stop it at once."""
    group.leave(member)
    finish_draining(group, member, within_s, closing)


def finish_draining(
    group: RankGroup, member: Member, within_s: float, closing: threading.Event
) -> None:
    """Drain and stop a rank that is out of the directory already."""
    started_s = time.monotonic()
    if not member.replacement_reason:
        closing.wait(PROPAGATION_S)
        _wait_drained(member, started_s + within_s, closing)
    if member.replacement_reason or not _has_stopped(member):
        member.kill()
    else:
        ray.kill(member.handle.actor)
    release_place(member.place)
    group.gone(member)
    seconds = round(time.monotonic() - started_s, 1)
    event(log, "worker_stopped", name=member.name, seconds=seconds)


def _wait_drained(member: Member, until_s: float, closing: threading.Event) -> None:
    """Wait until it is drained.

    If it is lost or hangs, its requests are resumed as after any loss.
    """
    within_s = max(0.0, until_s - time.monotonic())
    last_s = time.monotonic() + within_s + LATE_S
    drain_reply = member.handle.call("drain", within_s)
    while not closing.wait(POLL_PERIOD_S) and time.monotonic() < last_s:
        try:
            status: RankStatus = member.handle.call("status").result(REPLY_TIMEOUT_S)
            if drain_reply.done():
                drain_reply.result()
        except TimeoutError:
            continue
        except (TandemError, RayError) as error:
            event(log, "rank_lost_while_draining", logging.WARNING, name=member.name, reason=error)
            return
        if status.notes.get("leaving") == DRAINED or not status.healthy:
            return


def _has_stopped(member: Member) -> bool:
    try:
        member.handle.call("stop").result(REPLY_TIMEOUT_S)
    except (TandemError, RayError, TimeoutError) as error:
        event(log, "rank_stop_failed", logging.WARNING, name=member.name, error=error)
        return False
    return True


class Autoscaler:
    """Autoscaler of one group of prefill workers, from `start` to `close`."""

    def __init__(self, group: RankGroup, config: TandemConfig) -> None:
        self._group, self._config = group, config
        self._policy = UtilizationScaling(config.scaling, config.groups.prefill_ranks)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def keep(self, least: int) -> None:
        self._policy.least = least

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def poll(self, now_s: float) -> None:
        """Take at most one step, which may take minutes.

        Raises the error that prevents the start of a worker; its placement is released then. A
        worker that leaves may complete its requests for http.request_timeout_s.
        """
        members, config = list(self._group.members), self._config
        utilizations = [utilization_of(member.status) for member in members]
        known = [utilization for utilization in utilizations if utilization is not None]
        is_steady = len(known) == len(members) and not any(
            one.replacement_reason for one in members
        )
        step = self._policy.step(now_s, known, is_steady=is_steady)
        utilization, workers = round(self._policy.utilization, 2), len(members)
        if step > 0:
            event(log, "prefill_scale_up", workers=workers, utilization=utilization)
            # Equal parts of the remaining memory for all workers that may still be added.
            share, closing = config.prefill_slots - workers, self._closing
            add_member(self._group, Group.PREFILL, workers, config, share=share, closing=closing)
        elif step < 0:
            event(log, "prefill_scale_down", name=members[-1].name, utilization=utilization)
            within_s = config.http.request_timeout_s
            remove_member(self._group, members[-1], within_s, self._closing)

    def _run(self) -> None:
        while not self._closing.wait(POLL_PERIOD_S):
            try:
                self.poll(time.monotonic())
            except (TandemError, RayError, TimeoutError, CancelledError) as error:
                event(log, "prefill_scale_failed", logging.ERROR, error=error)
                self._closing.wait(self._config.scaling.look_back_period_s)


def utilization_of(status: RankStatus | None) -> float | None:
    """Return a worker's open work over its saturation threshold, or None if it has not reported."""
    work = status.sections.get("work") if status is not None else None
    return work["load"] / work["saturation"] if work and work.get("saturation") else None
