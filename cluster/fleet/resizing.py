"""Changes of the number of ranks of a running server, one at a time.

begin ── feasible? ─> thread: additions one by one, then removals ─> done or failed
    completed steps stay if a later one fails; `state` has the numbers

A launcher that adopts the ranks resumes the change (`resume`, fleet_store.py). `tandem scale`
requests it (cluster/http/admin.py). With an autoscaler, the number of prefill workers is its
minimum.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError

import msgspec
import ray
from ray.exceptions import RayError

from actors.ranks.expert_resize import RunningRank, expert_ranks_in_use, place_experts
from cluster.fleet.membership import (
    Autoscaler,
    add_member,
    find_kept_place,
    finish_draining,
    remove_member,
)
from cluster.fleet.rank_group import Member, RankGroup
from contracts.config import SCALABLE, TandemConfig
from contracts.errors import LaunchError, NotReadyError, OverloadError, RequestError, TandemError
from contracts.logs import event
from contracts.ranks import Group, rank_name
from contracts.scaling import ScaleCheckpoint, ScaleState, ScaleTarget, check_target, format_counts

log = logging.getLogger("tandem.fleet")

RETRY_AFTER_S = 5.0
POLL_S = 0.2
MAX_RESUMES = 2  # of one change


class Resizer:
    """Resizer of one fleet. Thread-safe. scalers: autoscalers of its prefill workers."""

    def __init__(
        self,
        groups: Sequence[RankGroup],
        config: TandemConfig,
        scalers: Sequence[Autoscaler] = (),
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a resizer. keep: stores `kept` for a successor; called before each step."""
        self._groups, self._config, self._scalers = groups, config, scalers
        self._keep, self._resumed, self._min_prefill = keep, 0, 0
        self._lock = threading.Lock()  # guards the recorded state
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._recorded = ScaleState()  # without ranks and seconds
        self._started_s = self._ended_s = 0.0

    @property
    def state(self) -> ScaleState:
        with self._lock:
            until_s = time.monotonic() if self._recorded.state == "running" else self._ended_s
            seconds = round(until_s - self._started_s, 1)
            return msgspec.structs.replace(self._recorded, ranks=self._counts(), seconds=seconds)

    def begin(self, requested: ScaleTarget) -> ScaleState:
        """Start a change.

        Raises RequestError for an impossible one, NotReadyError without room, OverloadError during
        another.
        """
        with self._lock:
            if self._recorded.state == "running":
                raise OverloadError(self._under_way(), RETRY_AFTER_S)
            changes = check_target(requested, self._counts())
            self._check(changes)
            self._recorded = ScaleState(
                state="running" if changes else "done",
                number=self._recorded.number + 1,
                requested=requested,
                steps=[] if changes else ["there are so many already"],
            )
            self._resumed, self._started_s = 0, time.monotonic()
            self._ended_s = self._started_s
        if changes:
            self._begin(changes)
        return self.state

    def resume(self, kept: ScaleCheckpoint) -> None:
        """Resume the state of the previous launcher, without waiting.

        Draining ranks continue to drain. A running change starts again from the current ranks, so
        that completed steps are skipped. After MAX_RESUMES it is abandoned, and unused expert ranks
        are removed.
        """
        state, self._min_prefill = kept.state, kept.min_prefill
        for scaler in self._scalers if self._min_prefill else ():
            scaler.keep(self._min_prefill)
        with self._lock:
            self._recorded = state
            self._started_s = self._ended_s = time.monotonic()
            self._resumed = kept.resumed + (state.state == "running")
        if state.state == "running":
            self._begin(state.requested.counts)
        else:
            threading.Thread(target=self._finish_draining, name="leaving", daemon=True).start()

    @property
    def kept(self) -> ScaleCheckpoint:
        """State for a successor; unchanged while nothing happens."""
        with self._lock:
            return ScaleCheckpoint(self._recorded, self._resumed, self._min_prefill)

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _check(self, changes: Mapping[str, int]) -> None:
        """Raise RequestError for an impossible change, NotReadyError without room for it now."""
        if (count := changes.get("prefill_workers")) is not None:
            _check_prefill(count, self._config, follows_load=bool(self._scalers))
        if (count := changes.get("expert_ranks")) is not None:
            _check_experts(count, self._members(Group.EXPERT)[0])
        for name, count in changes.items():
            _check_room(name, count, _group_of(KIND_OF[name], self._groups))

    def _counts(self) -> dict[str, int]:
        """Return the current number of ranks per kind."""
        counts = {name: len(self._members(kind)) for name, kind in KIND_OF.items()}
        return {name: count for name, count in counts.items() if count}

    def _under_way(self) -> str:
        requested = format_counts(self._recorded.requested.counts)
        seconds = time.monotonic() - self._started_s
        return (
            f"another scale is in progress ({requested}, for {seconds:.0f} s): wait until it ends"
        )

    # ---- in its thread

    def _begin(self, changes: dict[str, int]) -> None:
        self._save_record()
        resumed = self._resumed
        event(
            log, "scale_started", logging.WARNING, requested=format_counts(changes), resumed=resumed
        )
        self._thread = threading.Thread(
            target=self._run, args=(changes,), name="resizing", daemon=True
        )
        self._thread.start()

    def _run(self, changes: dict[str, int]) -> None:
        reason = ""
        try:
            if self._resumed:
                self._resume_change()
            for name, count in changes.items():
                self._resize(KIND_OF[name], count)
        except (TandemError, RayError) as error:
            reason = str(error).partition("\n")[0]
        except (TimeoutError, CancelledError) as error:
            reason = f"no answer in time ({type(error).__name__})"
        except Exception as error:  # noqa: BLE001 - logged and reported in `state`
            event(log, "scale_failed", logging.ERROR, error)
            reason = f"{type(error).__name__}: see the log of the launcher"
        with self._lock:
            self._ended_s, progress = time.monotonic(), "failed" if reason else "done"
            self._recorded = msgspec.structs.replace(self._recorded, state=progress, reason=reason)
        self._save_record()
        level = logging.ERROR if reason else logging.WARNING
        event(
            log,
            "scale_finished",
            level,
            reason=reason or "none",
            ranks=format_counts(self._counts()),
        )

    def _resize(self, kind: Group, count: int) -> None:
        if kind is Group.PREFILL and self._scalers:
            self._follow_load(count)
            return
        if kind is Group.EXPERT:
            self._redistribute_experts(count)
            return
        while (current := len(self._members(kind))) < count and not self._closing.is_set():
            self._add(kind, current, share=count - current)
        while len(self._members(kind)) > count and not self._closing.is_set():
            self._end(self._members(kind)[-1])
        if self._closing.is_set():
            raise LaunchError("the server is shutting down")

    def _redistribute_experts(self, count: int) -> None:
        """Add empty ranks, move experts, then remove the emptied ranks.

        A failed move restores the ranks.
        """
        current = self._experts_in_use() if self._resumed else len(self._members(Group.EXPERT))
        try:
            for rank in range(len(self._members(Group.EXPERT)), count):
                self._add(Group.EXPERT, rank, share=1)
            self._add_step(f"experts move to {count} ranks")
            place_experts(self._working, count, self._config, self._closing)
        except BaseException:
            for member in self._members(Group.EXPERT)[current:]:
                self._end(member)
            raise
        for member in reversed(self._members(Group.EXPERT)[count:]):
            self._end(member)

    def _experts_in_use(self) -> int:
        """Return the number of expert ranks that attention ranks use."""
        return expert_ranks_in_use(self._working) if self._members(Group.EXPERT) else 0

    def _working(self) -> list[RunningRank]:
        """Return the working ranks of the group with experts."""
        members = _group_of(Group.EXPERT, self._groups).members
        return [RunningRank(one.ready, one.handle) for one in members if not one.replacement_reason]

    def _resume_change(self) -> None:
        """Prepare the resumption of a change. Raises LaunchError after MAX_RESUMES."""
        self._add_step("another launcher of the ranks has taken over")
        self._finish_draining()
        if self._resumed > MAX_RESUMES:
            for member in reversed(self._members(Group.EXPERT)[self._experts_in_use() :]):
                self._end(member)
            raise LaunchError(
                f"launchers of the ranks have ended {self._resumed} times in this change: see why "
                "in the log, then scale again"
            )

    def _finish_draining(self) -> None:
        """Drain the ranks that the previous launcher was removing."""
        for group in self._groups:
            for member in group.draining:
                finish_draining(group, member, self._config.groups.drain_timeout_s, self._closing)

    def _add(self, kind: Group, rank: int, *, share: int) -> None:
        name, closing = rank_name(kind, rank), self._closing
        self._add_step(f"{name} starts")
        group = _group_of(kind, self._groups)
        seconds = add_member(group, kind, rank, self._config, share=share, closing=closing)
        if seconds is not None:
            self._add_step(f"{name} serves, after {seconds:g} s")

    def _end(self, member: Member) -> None:
        started_s, within_s = time.monotonic(), self._config.groups.drain_timeout_s
        self._add_step(f"{member.name} leaves: it has {within_s:g} s for what it has")
        group = _group_of(member.spec.group, self._groups)
        remove_member(group, member, within_s, self._closing)
        seconds, place = time.monotonic() - started_s, member.place
        kept = "" if place.is_exclusive else f"; its seat is kept ({format_counts(place.needs)})"
        self._add_step(f"{member.name} is gone, after {seconds:.1f} s{kept}")

    def _follow_load(self, count: int) -> None:
        """Set the autoscaler's minimum and wait for it; surplus workers end by load."""
        self._add_step(f"prefill workers follow the load: {count} at least from now on")
        self._min_prefill = count
        for scaler in self._scalers:
            scaler.keep(count)
        end_s = time.monotonic() + count * self._config.groups.ready_timeout_s
        while len(self._members(Group.PREFILL)) < count:
            if self._closing.wait(POLL_S) or time.monotonic() > end_s:
                raise LaunchError(
                    f"prefill_workers={count}: {len(self._members(Group.PREFILL))} are there; the "
                    "log of the launcher says what keeps the others from starting"
                )

    def _add_step(self, step: str) -> None:
        with self._lock:
            steps = [*self._recorded.steps, step]
            self._recorded = msgspec.structs.replace(self._recorded, steps=steps)
        self._save_record()

    def _save_record(self) -> None:
        if not self._closing.is_set():  # else no successor resumes it
            self._keep()

    def _members(self, kind: Group) -> list[Member]:
        return [member for group in self._groups for member in group.of_kind(kind)]


KIND_OF = {
    "attention_ranks": Group.ATTENTION,
    "expert_ranks": Group.EXPERT,
    "prefill_workers": Group.PREFILL,
}


def _group_of(kind: Group, groups: Sequence[RankGroup]) -> RankGroup:
    return next(group for group in groups if group.of_kind(kind))


def _check_experts(count: int, first: Member) -> None:
    experts = first.spec.placement.num_experts
    if count > experts:
        raise RequestError(
            f"expert_ranks={count}: the model has {experts} experts per layer; "
            "use at most that many ranks",
            "expert_ranks",
        )


def _check_prefill(count: int, config: TandemConfig, *, follows_load: bool) -> None:
    """follows_load: an autoscaler controls prefill workers."""
    most, experts = config.prefill_slots, config.prefill.experts
    if experts not in SCALABLE:
        raise RequestError(
            f"prefill_workers={count} with prefill.experts={experts}: its workers divide the "
            f"experts among them; use {', '.join(SCALABLE)}",
            "prefill_workers",
        )
    if count > most:
        name = "scaling.max_prefill_ranks" if follows_load else "groups.prefill_ranks"
        raise RequestError(
            f"prefill_workers={count}: this server was started for {most} at most ({name}); "
            "start it with a larger scaling.max_prefill_ranks",
            "prefill_workers",
        )


def _check_room(name: str, count: int, group: RankGroup) -> None:
    """Raise NotReadyError if the free resources of the Ray cluster are insufficient."""
    kind = KIND_OF[name]
    current = group.of_kind(kind)
    new = [n for n in range(len(current), count) if find_kept_place(group, kind, n) is None]
    free = ray.available_resources() if new else {}
    for resource, each in current[0].place.needs.items():
        if new and each * len(new) > free.get(resource, 0.0) + 1e-9:
            raise NotReadyError(
                f"{name}={count}: {len(new)} more need {each * len(new):g} {resource}, the Ray "
                f"cluster has {free.get(resource, 0.0):g} free; add nodes, or ask for fewer"
            )
