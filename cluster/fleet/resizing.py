"""The number of ranks of a server that runs, changed one request at a time.

begin ── can it be? ─> a thread: more ranks, one after the other, then fewer ─> done, or failed
    what has been done stays where a later step fails: `state` says how many there are

`tandem scale` asks for it (cluster/api/scaled.py). Prefill workers that follow the load
(cluster/fleet/scaler.py) are told how many there are to be at least, and come by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

import ray
from ray.exceptions import RayError

from actors.ranks.placing import Working, expert_ranks_in_use, place_experts
from cluster.fleet.growth import add_member, end_member, kept_place
from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.scaler import Scaler
from contracts.config import SCALABLE, TandemConfig
from contracts.errors import LaunchError, NotReadyError, OverloadError, RequestError, TandemError
from contracts.logs import event
from contracts.scaling import Progress, ScaleState, ScaleWanted, check_wanted, in_words
from contracts.worker import Group, rank_name

log = logging.getLogger("tandem.fleet")

AGAIN_S = 5.0
LOOK_S = 0.2
KIND_OF = {
    "attention_ranks": Group.ATTENTION,
    "expert_ranks": Group.EXPERT,
    "prefill_workers": Group.PREFILL,
}


class Resizing:
    """Of one fleet, from any thread. scalers: of its prefill workers."""

    def __init__(
        self, groups: Sequence[RankGroup], config: TandemConfig, scalers: Sequence[Scaler] = ()
    ) -> None:
        self._groups, self._config, self._scalers = groups, config, scalers
        self._lock = threading.Lock()  # guards what `state` tells
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: Progress = "idle"
        self._number, self._reason = 0, ""
        self._wanted, self._steps = ScaleWanted(), list[str]()
        self._begun_s = self._ended_s = 0.0

    @property
    def state(self) -> ScaleState:
        with self._lock:
            until_s = time.monotonic() if self._progress == "running" else self._ended_s
            return ScaleState(
                state=self._progress,
                number=self._number,
                wanted=self._wanted,
                ranks=self._there(),
                steps=list(self._steps),
                reason=self._reason,
                seconds=round(until_s - self._begun_s, 1),
            )

    def begin(self, wanted: ScaleWanted) -> ScaleState:
        """Raises RequestError for what can never be, NotReadyError where there is no room,
        OverloadError while another one is under way."""
        with self._lock:
            if self._progress == "running":
                raise OverloadError(self._under_way(), AGAIN_S)
            changes = check_wanted(wanted, self._there())
            self._check(changes)
            self._number += 1
            self._wanted, self._reason, self._begun_s = wanted, "", time.monotonic()
            self._steps = [] if changes else ["there are so many already"]
            self._progress, self._ended_s = "running" if changes else "done", self._begun_s
        if changes:
            event(log, "scale_begins", logging.WARNING, wanted=in_words(changes))
            self._thread = threading.Thread(
                target=self._run, args=(changes,), name="resizing", daemon=True
            )
            self._thread.start()
        return self.state

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- whether it can be

    def _there(self) -> dict[str, int]:
        """How many there are, of the kinds that the server has."""
        counts = {name: len(self._members(kind)) for name, kind in KIND_OF.items()}
        return {name: count for name, count in counts.items() if count}

    def _under_way(self) -> str:
        wanted = in_words(self._wanted.counts)
        seconds = time.monotonic() - self._begun_s
        return (
            f"another scale is under way ({wanted}, for {seconds:.0f} s): wait until it has ended"
        )

    def _check(self, changes: dict[str, int]) -> None:
        if (count := changes.get("prefill_workers")) is not None:
            self._check_prefill(count)
        if (count := changes.get("expert_ranks")) is not None:
            self._check_experts(count)
        for name, count in changes.items():
            self._check_room(name, count)

    def _check_experts(self, count: int) -> None:
        placement = self._members(Group.EXPERT)[0].spec.placement
        if count > placement.num_experts:
            raise RequestError(
                f"expert_ranks={count}: the model has {placement.num_experts} experts per layer; "
                "use at most that many ranks",
                "expert_ranks",
            )

    def _check_prefill(self, count: int) -> None:
        most, experts = self._config.prefill_slots, self._config.prefill.experts
        if experts not in SCALABLE:
            raise RequestError(
                f"prefill_workers={count} with prefill.experts={experts}: its workers divide the "
                f"experts among them; use {', '.join(SCALABLE)}",
                "prefill_workers",
            )
        if count > most:
            name = "scaling.max_prefill_ranks" if self._scalers else "groups.prefill_ranks"
            raise RequestError(
                f"prefill_workers={count}: this server was started for {most} at most ({name}); "
                "start it with a larger scaling.max_prefill_ranks",
                "prefill_workers",
            )

    def _check_room(self, name: str, count: int) -> None:
        """What the Ray cluster has free now, of what they ask for."""
        kind, there = KIND_OF[name], len(self._members(KIND_OF[name]))
        group, first = self._group(kind), self._members(kind)[0]
        new = [n for n in range(there, count) if kept_place(group, kind, n) is None]
        free = ray.available_resources() if new else {}
        for resource, each in first.place.needs.items():
            if new and each * len(new) > free.get(resource, 0.0) + 1e-9:
                raise NotReadyError(
                    f"{name}={count}: {len(new)} more need {each * len(new):g} {resource}, the Ray "
                    f"cluster has {free.get(resource, 0.0):g} free; add nodes, or ask for fewer"
                )

    # ---- in its thread

    def _run(self, changes: dict[str, int]) -> None:
        reason = ""
        try:
            for name, count in changes.items():
                self._resize(KIND_OF[name], count)
        except (TandemError, RayError) as error:
            reason = str(error).partition("\n")[0]
        except (FutureTimeoutError, CancelledError) as error:
            reason = f"no answer in time ({type(error).__name__})"
        except Exception as error:  # noqa: BLE001 - logged; whoever waits is told
            event(log, "scale_broken", logging.ERROR, error)
            reason = f"{type(error).__name__}: see the log of the launcher"
        with self._lock:
            self._ended_s, self._reason = time.monotonic(), reason
            self._progress = "failed" if reason else "done"
        level = logging.ERROR if reason else logging.WARNING
        event(log, "scale_ended", level, reason=reason or "none", ranks=in_words(self._there()))

    def _resize(self, kind: Group, count: int) -> None:
        if kind is Group.PREFILL and self._scalers:
            self._follow_load(count)
            return
        if kind is Group.EXPERT:
            self._divide_experts(count)
            return
        while (there := len(self._members(kind))) < count and not self._closing.is_set():
            self._add(kind, there, share=count - there)
        while len(self._members(kind)) > count and not self._closing.is_set():
            self._end(self._members(kind)[-1])
        if self._closing.is_set():
            raise LaunchError("the server ends")

    def _divide_experts(self, count: int) -> None:
        """Ranks that come have nothing until experts have moved there, those that go have nothing
        left. Where they cannot move, all is as it was."""
        there = len(self._members(Group.EXPERT))
        try:
            for rank in range(there, count):
                self._add(Group.EXPERT, rank, share=1)
            self._tell(f"experts move to {count} ranks")
            place_experts(self._working, count, self._config, self._closing)
        except BaseException:
            for member in self._members(Group.EXPERT)[there:]:
                self._end(member)
            raise
        for member in reversed(self._members(Group.EXPERT)[count:]):
            self._end(member)

    def _working(self) -> list[Working]:
        """Of the group that experts are moved in."""
        members = self._group(Group.EXPERT).members
        return [Working(one.ready, one.handle) for one in members if not one.replaced_for]

    def trim(self) -> None:
        """Of a launcher that takes over: expert ranks that nobody asks were to come or to go when
        the last one ended. They go. Waits for nobody."""
        if self._members(Group.EXPERT):
            threading.Thread(target=self._trim, name="trimming", daemon=True).start()

    def _trim(self) -> None:
        try:
            used = expert_ranks_in_use(self._working)
            if used < len(self._members(Group.EXPERT)):
                self.begin(ScaleWanted(expert_ranks=used))
        except (TandemError, RayError, FutureTimeoutError) as error:
            event(log, "expert_ranks_not_trimmed", logging.WARNING, error=error)

    def _add(self, kind: Group, rank: int, *, share: int) -> None:
        name, closing = rank_name(kind, rank), self._closing
        self._tell(f"{name} starts")
        group = self._group(kind)
        seconds = add_member(group, kind, rank, self._config, share=share, closing=closing)
        if seconds is not None:
            self._tell(f"{name} serves, after {seconds:g} s")

    def _end(self, member: Member) -> None:
        started_s, within_s = time.monotonic(), self._config.groups.drain_s
        self._tell(f"{member.name} leaves: it has {within_s:g} s for what it has")
        end_member(self._group(member.spec.group), member, within_s, self._closing)
        self._tell(f"{member.name} is gone, after {time.monotonic() - started_s:.1f} s")

    def _follow_load(self, count: int) -> None:
        """They come one by one; those that are more go as the load lets them."""
        self._tell(f"prefill workers follow the load: {count} at least from now on")
        for scaler in self._scalers:
            scaler.keep(count)
        end_s = time.monotonic() + count * self._config.groups.ready_timeout_s
        while len(self._members(Group.PREFILL)) < count:
            if self._closing.wait(LOOK_S) or time.monotonic() > end_s:
                raise LaunchError(
                    f"prefill_workers={count}: {len(self._members(Group.PREFILL))} are there; the "
                    "log of the launcher says what keeps the others from starting"
                )

    def _tell(self, step: str) -> None:
        with self._lock:
            self._steps.append(step)

    def _group(self, kind: Group) -> RankGroup:
        return next(group for group in self._groups if group.of_kind(kind))

    def _members(self, kind: Group) -> list[Member]:
        return [member for group in self._groups for member in group.of_kind(kind)]
