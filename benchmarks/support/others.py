"""How busy other programs keep the machine: figures of a run that shared it are not its own."""

import time
from collections.abc import Sequence
from typing import Any

import psutil

MOMENT_S = 0.3
QUIET_ROUNDS = 3


class Others:
    """CPU time of processes that are not `ours` (pids), since it was made."""

    def __init__(self, ours: Sequence[int]) -> None:
        self._ours = ours
        self._started_s = time.monotonic()
        self._before_s = self._seconds()

    def cores(self) -> float:
        """Cores that others have kept busy, on average."""
        spent_s = self._seconds() - self._before_s
        return max(0.0, spent_s / (time.monotonic() - self._started_s))

    def _seconds(self) -> float:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        return float(busy_s) - sum(map(_process_s, self._ours))


def wait_for_idle(ours: Sequence[int], *, limit_s: float, cores: float) -> bool:
    """Waits until others keep fewer than `cores` busy for a moment, at most limit_s."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        others = Others(ours)
        time.sleep(MOMENT_S)
        if others.cores() < cores:
            return True
    return False


def quietest(samples: Sequence[Any], cores: float) -> list[Any]:
    """Rounds (with `others_cores`) in which others kept at most `cores` busy, or the QUIET_ROUNDS
    that came closest."""
    quiet = [sample for sample in samples if sample.others_cores <= cores]
    if len(quiet) >= QUIET_ROUNDS:
        return quiet
    return sorted(samples, key=lambda sample: sample.others_cores)[:QUIET_ROUNDS]


def _process_s(pid: int) -> float:
    """CPU time of all its threads; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
