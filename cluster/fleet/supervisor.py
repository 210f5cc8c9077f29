"""Supervision of all ranks.

supervisor thread: every CHECK_PERIOD_S request the status of each rank
    dead, silent, unhealthy (member.py) or reported by a router ─> the group's policy (repair.py)
        Replace ─> killed; replacement with a higher epoch (rank_group.py)
        GiveUp  ─> the group is beyond repair; the server's owner ends it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.fleet.member import CHECK_PERIOD_S, Member
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.repair import Action, GiveUp
from contracts.logs import event

log = logging.getLogger("tandem.fleet")

RETRY_S = 1.0  # between attempts; doubled up to MAX_RETRY_S
MAX_RETRY_S = 30.0
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
            self._notify_round()

    def _notify_round(self) -> None:
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
