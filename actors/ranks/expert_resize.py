"""Resize of a running group's expert ranks: the launcher's part.

    attention ranks <── connect ── all expert ranks, including new ones
    expert ranks    ──> placed ──> their experts and free memory
                    <── place ──── the next generation (planner/placement/resize.py)
                    ──> placed ──> repeatedly, until only the new generation is used

New ranks are started before, unused ranks stop afterwards. Once the placement is sent, the ranks
complete the transition without the launcher (actors/rebalance/expert_rebalancer.py).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

from actors.ranks.rendezvous import WorkerHandle, channel_addresses, gather, peer_addresses
from actors.rebalance.placement_generations import is_taken
from contracts.clock import monotonic_s
from contracts.config import PlacementConfig, TandemConfig
from contracts.errors import LaunchError, ResourceError, TandemError
from contracts.logs import event
from contracts.placement import Placement, PlacementState, PlacementUpdate
from contracts.ranks import Group, RankReady, rank_names
from planner.placement.resize import experts_received, resize_placement

log = logging.getLogger("tandem.fleet")

ANSWER_S: Final = 10.0  # for a rank to answer, or to connect
POLL_S: Final = 0.1
SETTLE_S: Final = 5.0  # for all ranks to abort
TRIES: Final = 5  # if the planner proposes a placement at the same time


class RunningRank(NamedTuple):
    """A rank in service, not one that is being replaced."""

    ready: RankReady
    handle: WorkerHandle


FindRanks = Callable[[], Sequence[RunningRank]]
"""Returns the attention and expert ranks in service, including new ones and those that leave."""


def place_experts(
    find: FindRanks, expert_ranks: int, config: TandemConfig, closing: threading.Event | None = None
) -> Placement:
    """Move the experts to `expert_ranks` ranks; return the placement that all attention ranks use.

    Blocks; closing: ends the wait. On any error the group keeps its placement. Raises ConfigError
    for an impossible number of ranks, ResourceError if memory does not suffice, LaunchError for any
    other failure.
    """
    resizer = _Resizer(find, config.placement, closing or threading.Event())
    for _ in range(TRIES):
        placed = resizer.place(expert_ranks)
        if placed is not None:
            return placed
    raise LaunchError(f"{expert_ranks} expert ranks: experts keep moving: try again")


def expert_ranks_in_use(find: FindRanks) -> int:
    """Return the number of expert ranks in use. Raises LaunchError if none answers."""
    resizer = _Resizer(find, PlacementConfig(), threading.Event())
    return _newest(resizer.answers(wait_s=ANSWER_S)).placement.ranks


class _Resizer:
    def __init__(self, find: FindRanks, config: PlacementConfig, closing: threading.Event) -> None:
        self._find, self._config, self._closing = find, config, closing
        self._pending: dict[str, tuple[int, Future[PlacementState]]] = {}
        self._introduced: set[int] = set()  # process ids

    def place(self, expert_ranks: int) -> Placement | None:
        """Return the new placement, or None if another move was started at the same time."""
        self._introduce(wait_s=ANSWER_S)
        reports = self._wait_until_ready()
        before = _newest(reports).placement
        if before.ranks == expert_ranks:
            return before
        generation = 1 + max(each.newest for each in reports.values())
        target = resize_placement(before, expert_ranks, generation=generation)
        needed = rank_names(Group.EXPERT, max(before.ranks, expert_ranks))
        missing = [name for name in needed if name not in reports]
        if missing:
            reason = f"{missing[0]} is not in service: try again when it is"
            raise LaunchError(f"{expert_ranks} expert ranks: {reason}")
        most_bytes = _check_room(before, target, reports)
        within_s = self._config.move_timeout_s + 2 * most_bytes / self._config.bytes_per_s
        event(log, "expert_resize_started", ranks=expert_ranks, generation=generation)
        failure = self._send_placement(
            needed, PlacementUpdate(placement=target, present=before, within_s=within_s)
        )
        return self._wait_for_outcome(target, failure, monotonic_s() + 2 * within_s + SETTLE_S)

    def answers(self, wait_s: float) -> dict[str, PlacementState]:
        """Return the states of the expert ranks that answer in time, by name.

        `_pending` then has the ranks in service that have not answered.
        """
        ranks = {one.ready.name: one for one in self._of(Group.EXPERT)}
        self._pending = {name: sent for name, sent in self._pending.items() if name in ranks}
        for name, one in ranks.items():
            if name not in self._pending or self._pending[name][0] != one.ready.pid:
                self._pending[name] = one.ready.pid, one.handle.call("placed")
        wait([self._pending[name][1] for name in ranks], wait_s)
        found: dict[str, PlacementState] = {}
        for name in [name for name in ranks if self._pending[name][1].done()]:
            _, answer = self._pending.pop(name)
            if answer.exception() is None:
                found[name] = answer.result()
        return found

    def _wait_until_ready(self) -> dict[str, PlacementState]:
        """Return the states once all ranks are linked and idle. Raises LaunchError."""
        end_s = monotonic_s() + 2 * self._config.move_timeout_s
        while True:
            reports = self.answers(wait_s=ANSWER_S)
            if not reports:
                raise LaunchError("no expert rank reports its state: none is in service")
            reasons = [
                f"generation {each.under_way} of the placement is under way"
                for each in reports.values()
                if each.under_way is not None
            ] or [
                f"{n}: no attention rank is linked" for n, each in reports.items() if not each.links
            ]
            if not reasons:
                return reports
            if monotonic_s() > end_s or self._closing.wait(POLL_S):
                raise LaunchError(f"{reasons[0]}: try again later")

    def _send_placement(self, names: Sequence[str], target: PlacementUpdate) -> str:
        """Send the placement to all ranks that are in service; return why one did not accept it."""
        ranks = {one.ready.name: one for one in self._of(Group.EXPERT)}
        lost = [name for name in names if name not in ranks]
        reachable = [name for name in names if name in ranks]
        sends = [(name, ranks[name].handle.call("place", target)) for name in reachable]
        wait([replies for _, replies in sends], ANSWER_S)
        if lost:
            return f"{lost[0]}: it is lost"
        try:
            gather(sends, "receive its experts", monotonic_s())
        except TandemError as error:
            return error.message
        return ""

    def _wait_for_outcome(self, target: Placement, failure: str, end_s: float) -> Placement | None:
        """Wait until the placement is used, or has failed everywhere. failure: a known one."""
        generation = target.generation
        while not self._closing.wait(POLL_S):
            self._introduce(wait_s=0.0)
            reports = self.answers(wait_s=POLL_S)
            is_used = any(each.placement.generation >= generation for each in reports.values())
            # `newest` changes before `under_way`.
            is_known = any(each.newest >= generation for each in reports.values())
            under_way = any(each.under_way == generation for each in reports.values())
            is_finished = is_known and not under_way and not self._pending
            if is_used and (is_finished or monotonic_s() > end_s):
                return target if _newest(reports).placement == target else None
            reasons = [failure, *(each.failures.get(generation, "") for each in reports.values())]
            failure = min(filter(None, reasons), key=is_taken, default="")  # what no retry mends
            if failure and is_finished:
                if is_taken(failure):
                    return None
                raise LaunchError(f"{target.ranks} expert ranks: {failure}")
            if monotonic_s() > end_s:
                break
        raise LaunchError(
            f"{target.ranks} expert ranks: {failure or 'no outcome in time'}: see the logs "
            "of the expert ranks, or raise placement.move_timeout_s"
        )

    def _introduce(self, wait_s: float) -> None:
        """Connect all new ranks to the expert ranks; wait for them if wait_s is not 0."""
        ready = [one.ready for one in self._find()]
        ranks = self._of(Group.ATTENTION, Group.EXPERT)
        new = [one for one in ranks if one.ready.pid not in self._introduced]
        self._introduced.update(one.ready.pid for one in new)
        replies: list[tuple[str, Future[Any]]] = []
        for one in new:
            if one.ready.name.startswith(Group.ATTENTION):
                addresses = channel_addresses(ready, Group.EXPERT)
            else:
                addresses = peer_addresses(ready, Group.EXPERT)
            replies.append((one.ready.name, one.handle.call("connect", addresses)))
        if wait_s:
            gather(replies, "connect to the expert ranks", monotonic_s() + wait_s)

    def _of(self, *groups: Group) -> list[RunningRank]:
        starts = tuple(f"{group.value}-" for group in groups)
        return [one for one in self._find() if one.ready.name.startswith(starts)]


def _newest(reports: Mapping[str, PlacementState]) -> PlacementState:
    """Return the state with the newest generation. Raises LaunchError if there is none."""
    if not reports:
        raise LaunchError("no expert rank reports its state")
    return max(reports.values(), key=lambda each: each.placement.generation)


def _check_room(before: Placement, target: Placement, reports: Mapping[str, PlacementState]) -> int:
    """Return the most bytes that a rank loads. Raises ResourceError if a node lacks memory."""
    loads = zip(
        rank_names(Group.EXPERT, target.ranks), experts_received(before, target), strict=True
    )
    bytes_of = {name: experts * reports[name].expert_bytes for name, experts in loads}
    on_node: defaultdict[str, list[str]] = defaultdict(list)
    for name in bytes_of:
        on_node[reports[name].node].append(name)
    for names in on_node.values():
        needed = sum(bytes_of[name] for name in names)
        free = min(reports[name].free_bytes for name in names)
        if needed > free:
            raise ResourceError(
                f"{target.ranks} expert ranks: {', '.join(names)} would load {needed} bytes of "
                f"experts into {free} bytes of free memory: free some there, or have more ranks"
            )
    return max(bytes_of.values(), default=0)
