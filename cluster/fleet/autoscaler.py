"""Number of prefill workers by load: executes decisions of `planner/scheduling/prefill_scaling.py`.

A router that has not yet seen the removal of a worker loses its connection and retries elsewhere.
One step at a time, on a separate thread. Steps: `membership.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

from ray.exceptions import RayError

from cluster.fleet.membership import add_member, remove_member
from cluster.fleet.rank_group import Member, RankGroup
from contracts.config import TandemConfig
from contracts.errors import TandemError
from contracts.logs import event
from contracts.ranks import Group, RankStatus
from planner.scheduling.prefill_scaling import UtilizationScaling

log = logging.getLogger("tandem.fleet")

POLL_PERIOD_S = 0.5


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
        """Set the minimum number of workers."""
        self._policy.least = least

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def poll(self, now_s: float) -> None:
        """Take at most one step, which may take minutes."""
        members = list(self._group.members)
        utilizations = [utilization_of(member.status) for member in members]
        known = [utilization for utilization in utilizations if utilization is not None]
        is_steady = len(known) == len(members) and not any(
            one.replacement_reason for one in members
        )
        step = self._policy.step(now_s, known, is_steady=is_steady)
        if step > 0:
            self._add(len(members))
        elif step < 0:
            self._end(members[-1])

    def _run(self) -> None:
        while not self._closing.wait(POLL_PERIOD_S):
            try:
                self.poll(time.monotonic())
            except (TandemError, RayError, FutureTimeoutError, CancelledError) as error:
                event(log, "prefill_scale_failed", logging.ERROR, error=error)
                self._closing.wait(self._config.scaling.look_back_period_s)

    def _add(self, workers: int) -> None:
        """Add a worker.

        Raises the error that prevents its start; its placement is released then.
        """
        event(
            log, "prefill_scale_up", workers=workers, utilization=round(self._policy.utilization, 2)
        )
        # Equal parts of the remaining memory for all workers that may still be added.
        share = self._config.prefill_slots - workers
        config, closing = self._config, self._closing
        add_member(self._group, Group.PREFILL, workers, config, share=share, closing=closing)

    def _end(self, member: Member) -> None:
        """Remove a worker; it may complete its requests for http.request_timeout_s."""
        event(
            log,
            "prefill_scale_down",
            name=member.name,
            utilization=round(self._policy.utilization, 2),
        )
        remove_member(self._group, member, self._config.http.request_timeout_s, self._closing)


def utilization_of(status: RankStatus | None) -> float | None:
    """Return a worker's open work over its saturation threshold, or None if it has not reported."""
    work = status.sections.get("work") if status is not None else None
    return work["load"] / work["saturation"] if work and work.get("saturation") else None
