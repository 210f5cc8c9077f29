"""Memory of a server's processes over time, and whether it grows."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

SAMPLE_EVERY_S = 5.0
FLAT_FRACTION = 0.05
SETTLED_S = 600.0  # caches and pools are full by then
SPAN_S = 300.0
JUDGED_S = SETTLED_S + 2 * SPAN_S


class MemorySample(NamedTuple):
    """Resident bytes of one process; at_s: since the start."""

    at_s: float
    rss_bytes: int


class MemoryWatch:
    """Samples of each process, by (role, process id)."""

    def __init__(self, processes: Callable[[], dict[str, int]]) -> None:
        self._processes = processes
        self._started_s = time.monotonic()
        self.samples: dict[tuple[str, int], list[MemorySample]] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            await asyncio.to_thread(self._sample)

    def _sample(self) -> None:
        at_s = time.monotonic() - self._started_s
        for role, pid in self._processes().items():
            try:
                rss_bytes = int(psutil.Process(pid).memory_info().rss)
            except psutil.Error:
                continue
            self.samples.setdefault((role, pid), []).append(MemorySample(at_s, rss_bytes))

    def failures(self) -> list[str]:
        total_s = time.monotonic() - self._started_s
        found = []
        for (role, _), samples in self.samples.items():
            grown = growth_fraction(samples, total_s)
            if grown is not None and grown > FLAT_FRACTION:
                found.append(f"memory of {role} grew by {grown:.1%}, at most {FLAT_FRACTION:.0%}")
        return found


def growth_fraction(samples: Sequence[MemorySample], total_s: float) -> float | None:
    """Median of the last five minutes over that of minutes 10 to 15, minus 1; None for a run or a
    process that is too short to judge."""
    if total_s < JUDGED_S or samples[0].at_s > SETTLED_S:
        return None
    early = [s.rss_bytes for s in samples if SETTLED_S <= s.at_s <= SETTLED_S + SPAN_S]
    late = [s.rss_bytes for s in samples if s.at_s >= total_s - SPAN_S]
    if not early or not late:
        return None
    return statistics.median(late) / statistics.median(early) - 1
