"""All running ranks of both pipelines: addresses, status, supervision, scaling and shutdown.

supervisor thread: every CHECK_PERIOD_S request the status of each rank
    dead, silent, unhealthy or reported by a router ─> the group's policy (repair.py)
        Replace ─> killed; replacement with a higher epoch (rank_group.py)
        GiveUp  ─> the group is beyond repair; the server's owner ends it
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from actors.telemetry.telemetry import EndedCounters, Telemetry
from cluster.fleet.fleet_store import FleetStore
from cluster.fleet.membership import Autoscaler
from cluster.fleet.metrics_endpoint import ScrapeTargets
from cluster.fleet.rank_group import CHECK_PERIOD_S, Member, RankGroup, kill_all
from cluster.fleet.repair import Action, GiveUp
from cluster.fleet.replies import Directory
from cluster.fleet.resizing import Resizer
from cluster.fleet.tracing import gather_traces, trace_answer
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import TandemConfig
from contracts.logs import event
from contracts.plan import Plan
from contracts.ranks import Group, RankStatus
from contracts.scaling import ScaleCheckpoint, ScaleState, ScaleTarget
from contracts.traces import TaskSpan, TraceResponse

RETRY_S = 1.0  # between attempts; doubled up to MAX_RETRY_S
MAX_RETRY_S = 30.0
CLOSE_TIMEOUT_S = 10.0
SPARE_THREADS = 16  # for ranks that are added later


class Supervisor:
    """Supervisor, from `start` to `close`. Replacements run on separate threads."""

    def __init__(
        self, groups: Sequence[RankGroup], on_round: Callable[[], None] = lambda: None
    ) -> None:
        """Create a supervisor. on_round: called after each round."""
        self._groups = groups
        self._on_round = on_round
        self._closing = threading.Event()
        ranks = sum(len(group.members) for group in groups)
        self._threads = ThreadPoolExecutor(ranks + SPARE_THREADS, thread_name_prefix="replace")
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, now_s: float, stalled_s: float) -> None:
        """Run one round. stalled_s: time this process was stalled since the last one."""
        for group in self._groups:
            for action in group.policy(group.health(now_s, stalled_s)):
                self._act(group, action)

    def _run(self) -> None:
        checked_s = time.monotonic()
        while not self._closing.wait(CHECK_PERIOD_S):
            now_s = time.monotonic()
            stalled_s = max(0.0, now_s - checked_s - 2 * CHECK_PERIOD_S)
            checked_s = now_s
            self.check(now_s, stalled_s)
            try:
                self._on_round()
            except Exception as error:  # noqa: BLE001 - supervision continues with the next round
                event(log, "supervision_publish_failed", logging.WARNING, error=error)

    def _act(self, group: RankGroup, action: Action) -> None:
        if isinstance(action, GiveUp):
            if not group.beyond_repair:
                group.beyond_repair = action.reason
                event(log, "group_recovery_abandoned", logging.CRITICAL, reason=action.reason)
            return
        event(log, "worker_lost", logging.ERROR, name=action.lost, reason=action.reason)
        lost = [member for member in group.members if member.name in action.names]
        for member in lost:
            member.replacement_reason = action.reason
        self._threads.submit(self._replace, group, lost)

    def _replace(self, group: RankGroup, lost: Sequence[Member]) -> None:
        """Kill and restart the lost ranks; retry until they run or are no longer members."""
        names = ", ".join(member.name for member in lost)
        retry_s = RETRY_S
        for member in lost:
            member.kill()
        while not self._closing.is_set() and group.has(lost):
            try:
                group.restart(lost, self._closing)
                return
            except Exception as error:  # noqa: BLE001 - logged and retried
                if not self._closing.is_set():
                    event(log, "worker_replacement_failed", logging.ERROR, name=names, error=error)
            self._closing.wait(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)


class PlannerDiscovery:
    """Called each round by the supervisor, because a replacement planner has another address.

    Without a planner ranks use default plans. Assumes that the initial ranks have been notified.
    """

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._planners = [group for group in groups if group.kind is Group.PLANNER]
        self._clients = [group for group in groups if group.kind in (Group.ATTENTION, Group.EXPERT)]
        address = self._address
        self._notified = {member.name: (member.ready.pid, address) for member in self._members}
        self._sizes: dict[int, tuple[int, int]] = {}  # size of the group by planner process

    def update(self) -> None:
        """Notify the ranks that lack the current address, without waiting."""
        address = self._address
        for member in self._members if address else ():
            now = member.ready.pid, address
            if self._notified.get(member.name) != now:
                self._notified[member.name] = now
                member.handle.call("join_planner", address)
        for group in self._clients:
            self._update_size(group)

    def _update_size(self, group: RankGroup) -> None:
        """Write the number of ranks into the specs, for replacements."""
        size = len(group.of_kind(Group.ATTENTION)), len(group.of_kind(Group.EXPERT))
        planners = [member for one in self._planners for member in one.members]
        for planner in planners:
            made_for = planner.spec.attention_ranks, planner.spec.expert_ranks
            if self._sizes.setdefault(planner.ready.pid, made_for) != size:
                self._sizes[planner.ready.pid] = size
                planner.handle.call("resize", *size)
        attention, expert = size
        for member in (*group.members, *planners):
            if (member.spec.attention_ranks, member.spec.expert_ranks) != size:
                member.spec = msgspec.structs.replace(
                    member.spec, attention_ranks=attention, expert_ranks=expert
                )

    @property
    def _address(self) -> str:
        """Return the planner's address, empty if there is none."""
        members = [member for group in self._planners for member in group.members]
        return next(
            (one.ready.channel_address for one in members if not one.replacement_reason), ""
        )

    @property
    def _members(self) -> list[Member]:
        members = [member for group in self._clients for member in group.members]
        return [member for member in members if not member.replacement_reason]


log = logging.getLogger("tandem.fleet")


class Fleet:
    """Supervised ranks, from construction to `close`. Thread-safe."""

    def __init__(
        self,
        token: bytes,
        groups: Sequence[RankGroup],
        config: TandemConfig,
        scrape_targets: ScrapeTargets | None = None,
        store: FleetStore | None = None,
        kept: ScaleCheckpoint | None = None,
    ) -> None:
        """Supervise `groups` and record them for adoption.

        store: record for a launcher that adopts the ranks.
        kept: scaling state of the previous launcher, which is resumed.
        """
        self._token, self._store, self._all_groups = token, store, groups
        self._store_lock = threading.Lock()  # guards the store
        self._scalers: list[Autoscaler] = []
        if config.scaling.max_prefill_ranks is not None:
            workers = [group for group in groups if group.kind is Group.PREFILL]
            self._scalers = [Autoscaler(group, config) for group in workers]
        self._resizer = Resizer(groups, config, self._scalers, self._save_record)
        if kept is None:  # else the record is current
            self._save_record()
        self._groups = [group for group in groups if group.kind is not Group.PLANNER]
        self._telemetry = Telemetry()
        self._ended_counters = EndedCounters()
        self._register_metrics()
        self.scrape_targets = scrape_targets
        if scrape_targets is not None:
            scrape_targets.open(self._telemetry)
        self._planner_discovery = PlannerDiscovery(groups)
        self._supervisor = Supervisor(groups, self._on_round)
        if kept is not None:
            self._resizer.resume(kept)
        self._supervisor.start()
        for scaler in self._scalers:
            scaler.start()

    @property
    def directory(self) -> Directory:
        generating = [group for group in self._groups if group.kind is not Group.PREFILL]
        return Directory(
            client_addresses=_addresses(generating),
            prefill_addresses=_addresses(self._prefill),
            token=self._token,
            ranks=[ready for group in self._groups for ready in group.ready],
        )

    @property
    def beyond_repair(self) -> str:
        """Reason that a pipeline cannot serve any more; empty if all can."""
        return next((group.beyond_repair for group in self._groups if group.beyond_repair), "")

    def replace(self, suspects: Mapping[str, str]) -> None:
        """Replace the prefill workers at these client addresses, for the given reasons."""
        for group in self._prefill:
            group.suspect(suspects)

    def scale(self, requested: ScaleTarget) -> ScaleState:
        """Start to change the number of ranks. Raises the errors of `Resizer.begin`."""
        return self._resizer.begin(requested)

    @property
    def scale_state(self) -> ScaleState:
        return self._resizer.state

    def status(self, timeout_s: float) -> list[RankStatus]:
        """Return the status of each rank except the planner.

        A rank that does not answer is unhealthy.
        """
        answers = []
        for member, future in _call_all("status", self._groups):
            try:
                answers.append(future.result(timeout_s))
            except Exception as error:  # noqa: BLE001 - any error is the status of that rank
                answers.append(RankStatus(name=member.name, healthy=False, reason=str(error)))
        return answers

    def metrics(self, timeout_s: float) -> list[str]:
        """Return the Prometheus text of each process that answers, and of the launcher."""
        pages: dict[str, str | None] = {}  # by process: a replacement has another epoch
        for member, future in _call_all("metrics", self._all_groups):
            process = f"{member.name} {member.spec.epoch}"
            try:
                pages[process] = future.result(timeout_s)
            except Exception as error:  # noqa: BLE001 - a scrape shows the ranks that answer
                pages[process], name = None, member.name
                event(log, "rank_metrics_failed", logging.WARNING, name=name, error=error)
        texts = (text for text in pages.values() if text is not None)
        return [*texts, self._ended_counters.page(pages), self._telemetry.exposition()]

    def spans(self, timeout_s: float) -> list[TaskSpan]:
        """Return the recorded spans of all ranks in order of their start. Raises a rank's error."""
        pending = _call_all("trace", self._groups, 0.0)
        spans = [span for _, future in pending for span in future.result(timeout_s).spans]
        return sorted(spans, key=lambda span: span.start_s)

    def trace(self, seconds: float, since_s: float, first_pid: int) -> TraceResponse:
        """Return the spans of all ranks and the planner since `since_s`.

        seconds: age of `since_s`; 0: clocks only.
        """
        ranks = [member.handle for group in self._all_groups for member in group.members]
        found = gather_traces(ranks, since_s, monotonic_s, spans=seconds > 0)
        return trace_answer(found, seconds, first_pid)

    def pin_plan(self, plan: Plan | None, timeout_s: float) -> None:
        """Use this plan for all batches from now on; None: choose per batch."""
        for _, future in _call_all("pin_plan", self._groups, plan):
            future.result(timeout_s)

    def block_adoption(self) -> None:
        """Prevent other launchers from adopting these ranks."""
        if self._store is not None:
            with self._store_lock:
                self._store.end()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop scaling and supervision, then ranks in order; kill actors and release placements."""
        self._resizer.close(timeout_s)
        for scaler in self._scalers:
            scaler.close(timeout_s)
        self._supervisor.close(timeout_s)
        if self.scrape_targets is not None:
            self.scrape_targets.close()
        stop_ranks(self._all_groups, timeout_s)
        if self._store is not None:
            self._store.leave()

    def _register_metrics(self) -> None:
        """Register the launcher's own values, read at each scrape."""
        read = self._telemetry.read
        self._telemetry.read_each(metrics.RANK_UP, self._up)
        for group in self._all_groups:
            name = "attention_expert" if group.kind is Group.ATTENTION else group.kind
            read(metrics.GROUP_EPOCH, name, of=partial(getattr, group, "epoch"))
            read(metrics.RANK_RESTARTS, name, of=partial(getattr, group, "restarts"))

    def _up(self) -> dict[tuple[str, ...], float]:
        """Return whether each current rank is up, by group and name."""
        members = [member for group in self._all_groups for member in group.members]
        return {(member.spec.group, member.name): float(member.is_up) for member in members}

    def _on_round(self) -> None:
        self._planner_discovery.update()
        self._save_record()
        if self.scrape_targets is not None:
            self.scrape_targets.update(self._all_groups)

    def _save_record(self) -> None:
        """Record the state for a launcher that adopts the ranks. Thread-safe."""
        if self._store is None:
            return
        with self._store_lock:
            self._store.write(self._token, self._all_groups, self._resizer.kept)

    @property
    def _prefill(self) -> list[RankGroup]:
        return [group for group in self._groups if group.kind is Group.PREFILL]


def stop_ranks(groups: Sequence[RankGroup], timeout_s: float) -> None:
    """Stop ranks in order; kill their actors and release their placements."""
    for member, future in _call_all("stop", groups):
        try:
            future.result(timeout_s)
        except Exception as error:  # noqa: BLE001 - it is killed next in any case
            event(log, "rank_stop_failed", logging.WARNING, name=member.name, error=error)
        kill_all([member.handle])
    places = [member.place.placed for group in groups for member in group.members]
    for placed in {id(placed): placed for placed in places}.values():
        placed.release()


def _call_all(
    method: str, groups: Sequence[RankGroup], *arguments: Any
) -> list[tuple[Member, Future[Any]]]:
    members = [member for group in groups for member in group.members]
    return [(member, member.handle.call(method, *arguments)) for member in members]


def _addresses(groups: Sequence[RankGroup]) -> dict[str, str]:
    return {name: at for group in groups for name, at in group.client_addresses.items()}
