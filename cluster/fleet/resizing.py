"""The number of ranks of a server that runs, changed one request at a time.

begin ── can it be? ─> a thread: more ranks, one after the other, then fewer ─> done, or failed
    what has been done stays where a later step fails: `state` says how many there are

A launcher that ends in between is followed by one that goes on with it (`resume`; ledger.py).
`tandem scale` asks for it (cluster/api/scaled.py). Prefill workers that follow the load
(cluster/fleet/scaler.py) are told how many there are to be at least, and come by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

from ray.exceptions import RayError

from actors.ranks.placing import Working, expert_ranks_in_use, place_experts
from cluster.fleet.growth import add_member, end_member, finish_leaving
from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.scalable import KIND_OF, check_changes
from cluster.fleet.scaler import Scaler
from contracts.config import TandemConfig
from contracts.errors import LaunchError, OverloadError, TandemError
from contracts.logs import event
from contracts.scaling import (
    KeptScale,
    Progress,
    ScaleState,
    ScaleWanted,
    check_wanted,
    in_words,
)
from contracts.worker import Group, rank_name

log = logging.getLogger("tandem.fleet")

AGAIN_S = 5.0
LOOK_S = 0.2
MOST_RESUMED = 2  # launchers that go on with one change


class Resizing:
    """Of one fleet, from any thread. scalers: of its prefill workers."""

    def __init__(
        self,
        groups: Sequence[RankGroup],
        config: TandemConfig,
        scalers: Sequence[Scaler] = (),
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """keep: writes `kept` down, for another launcher; called before anything is done."""
        self._groups, self._config, self._scalers = groups, config, scalers
        self._keep, self._resumed, self._least = keep, 0, 0
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
            check_changes(changes, self._groups, self._config, follows_load=bool(self._scalers))
            self._number, self._resumed = self._number + 1, 0
            self._wanted, self._reason, self._begun_s = wanted, "", time.monotonic()
            self._steps = [] if changes else ["there are so many already"]
            self._progress, self._ended_s = "running" if changes else "done", self._begun_s
        if changes:
            self._begin(changes)
        return self.state

    def resume(self, kept: KeptScale) -> None:
        """Of a launcher that takes over: ranks that were leaving go on leaving, and what was under
        way is begun again from what is there now: each of its steps is none where it has been done.
        One that has outlived its launcher MOST_RESUMED times is not: expert ranks that nobody asks
        go then. Waits for nobody."""
        state, self._least = kept.state, kept.least_prefill
        for scaler in self._scalers if self._least else ():
            scaler.keep(self._least)
        with self._lock:
            self._number, self._wanted, self._reason = state.number, state.wanted, state.reason
            self._progress, self._steps = state.state, list(state.steps)
            self._begun_s = self._ended_s = time.monotonic()
            self._resumed = kept.resumed + (state.state == "running")
        if state.state == "running":
            self._begin(state.wanted.counts)
        else:
            threading.Thread(target=self._end_leaving, name="leaving", daemon=True).start()

    @property
    def kept(self) -> KeptScale:
        """What another launcher goes on with; the same as long as nothing is done."""
        with self._lock:
            state = ScaleState(
                state=self._progress,
                number=self._number,
                wanted=self._wanted,
                steps=list(self._steps),
                reason=self._reason,
            )
            return KeptScale(state, self._resumed, self._least)

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

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

    # ---- in its thread

    def _begin(self, changes: dict[str, int]) -> None:
        self._write_down()
        resumed = self._resumed
        event(log, "scale_begins", logging.WARNING, wanted=in_words(changes), resumed=resumed)
        self._thread = threading.Thread(
            target=self._run, args=(changes,), name="resizing", daemon=True
        )
        self._thread.start()

    def _run(self, changes: dict[str, int]) -> None:
        reason = ""
        try:
            if self._resumed:
                self._go_on()
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
        self._write_down()
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
        there = self._experts_in_use() if self._resumed else len(self._members(Group.EXPERT))
        try:
            for rank in range(len(self._members(Group.EXPERT)), count):
                self._add(Group.EXPERT, rank, share=1)
            self._tell(f"experts move to {count} ranks")
            place_experts(self._working, count, self._config, self._closing)
        except BaseException:
            for member in self._members(Group.EXPERT)[there:]:
                self._end(member)
            raise
        for member in reversed(self._members(Group.EXPERT)[count:]):
            self._end(member)

    def _experts_in_use(self) -> int:
        """Expert ranks that attention ranks ask; others have come for a change, or are to go."""
        return expert_ranks_in_use(self._working) if self._members(Group.EXPERT) else 0

    def _working(self) -> list[Working]:
        """Of the group that experts are moved in."""
        members = self._group(Group.EXPERT).members
        return [Working(one.ready, one.handle) for one in members if not one.replaced_for]

    def _go_on(self) -> None:
        """With what another launcher has begun. Raises LaunchError where that is not to be."""
        self._tell("another launcher of the ranks has taken over")
        self._end_leaving()
        if self._resumed > MOST_RESUMED:
            for member in reversed(self._members(Group.EXPERT)[self._experts_in_use() :]):
                self._end(member)
            raise LaunchError(
                f"launchers of the ranks have ended {self._resumed} times in this change: see why "
                "in the log, then scale again"
            )

    def _end_leaving(self) -> None:
        """Those that another launcher has told to leave, or was about to."""
        for group in self._groups:
            for member in group.leaving:
                finish_leaving(group, member, self._config.groups.drain_s, self._closing)

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
        seconds, place = time.monotonic() - started_s, member.place
        kept = "" if place.is_its_own else f"; its seat is kept ({in_words(place.needs)})"
        self._tell(f"{member.name} is gone, after {seconds:.1f} s{kept}")

    def _follow_load(self, count: int) -> None:
        """They come one by one; those that are more go as the load lets them."""
        self._tell(f"prefill workers follow the load: {count} at least from now on")
        self._least = count
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
        self._write_down()

    def _write_down(self) -> None:
        if not self._closing.is_set():  # else nobody goes on with it
            self._keep()

    def _group(self, kind: Group) -> RankGroup:
        return next(group for group in self._groups if group.of_kind(kind))

    def _members(self, kind: Group) -> list[Member]:
        return [member for group in self._groups for member in group.of_kind(kind)]
