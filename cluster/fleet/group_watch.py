"""Watches the ranks of a group that nobody repairs: when it can serve no more, that is said.

A prefill worker is replaced (cluster/fleet/prefill_group.py). An attention or expert rank is not,
and the others of its group can do nothing without it: whoever runs the server has to start it
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from actors.ranks.rendezvous import WorkerHandle
from cluster.fleet.rank_watch import CHECK_PERIOD_S, RankWatch
from contracts.logs import event

log = logging.getLogger("tandem.launch")


class GroupWatch:
    """reason: which ranks keep the group from serving, and why, once that has been so for
    give_up_s; empty: it serves, or may yet."""

    def __init__(self, names: Sequence[str], ranks: Sequence[WorkerHandle], give_up_s: float):
        self.reason = ""
        self._watches = [(name, RankWatch(rank)) for name, rank in zip(names, ranks, strict=True)]
        self._give_up_s = give_up_s
        self._since_s: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def look(self, now_s: float, stalled_s: float) -> None:
        """One round. stalled_s: how long this process itself stood still since the last one."""
        problems = [
            problem if name in problem else f"{name}: {problem}"
            for name, watch in self._watches
            if (problem := watch.look(now_s, stalled_s))
        ]
        if not problems:
            self._since_s = None
            return
        self._since_s = now_s if self._since_s is None else self._since_s + stalled_s
        if not self.reason and now_s - self._since_s >= self._give_up_s:
            self.reason = "; ".join(problems)
            event(log, "group_given_up", logging.CRITICAL, reason=self.reason)

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._closing.wait(CHECK_PERIOD_S):
            now_s = time.monotonic()
            stalled_s = max(0.0, now_s - looked_s - 2 * CHECK_PERIOD_S)
            looked_s = now_s
            self.look(now_s, stalled_s)
