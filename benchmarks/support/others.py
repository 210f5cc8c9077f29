"""How busy other programs keep the machine: figures of a run that shared it are not the machine's.

Linux: clock ticks from /proc.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
        return _machine_ticks() / TICKS_PER_S - cpu_seconds(self._ours)


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


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of these processes so far, to a clock tick (10 ms)."""
    return sum(map(_process_ticks, pids)) / TICKS_PER_S


def _machine_ticks() -> int:
    """user, nice, system, irq and softirq of all cores."""
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    user, nice, system, _, _, irq, softirq = map(int, first.split()[1:8])
    return user + nice + system + irq + softirq


def _process_ticks(pid: int) -> int:
    """user and system time of all its threads; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
