"""Whether a soak has passed: pure, of what was sampled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.soak.watch import Sample, Told

FLAT_FRACTION = 0.05
MINUTE_S = 60.0
SETTLED_S = 10 * MINUTE_S  # what is cached and pooled is full by then
SPAN_S = 5 * MINUTE_S
JUDGED_S = SETTLED_S + 2 * SPAN_S
MORE_DESCRIPTORS = 4  # than at the start: a log file, a kept connection
MORE_THREADS = 8  # than at the start: pools of the event loop that begin with their first use


def windows(total_s: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two spans whose medians are held against each other: minutes 10 to 15 and the last 5. A
    run that is shorter than 20 minutes has its second quarter and its last, to be looked at."""
    if total_s >= JUDGED_S:
        return (SETTLED_S, SETTLED_S + SPAN_S), (total_s - SPAN_S, total_s)
    return (total_s / 4, total_s / 2), (total_s * 3 / 4, total_s)


def growth_fraction(samples: Sequence[Sample], total_s: float) -> float:
    """The median resident memory of the late window over that of the early one, minus 1."""
    early, late = (_median_bytes(samples, *window) for window in windows(total_s))
    return late / early - 1


def _median_bytes(samples: Sequence[Sample], start_s: float, end_s: float) -> float:
    found = [sample.rss_bytes for sample in samples if start_s <= sample.at_s <= end_s]
    return statistics.median(found or [sample.rss_bytes for sample in samples])


def memory_faults(by_role: dict[str, list[Sample]], total_s: float) -> list[str]:
    """Of a run that is long enough to be judged: a shorter one is still filling its caches."""
    faults: list[str] = []
    if total_s < JUDGED_S:
        return faults
    for role, samples in by_role.items():
        grown = growth_fraction(samples, total_s)
        if grown > FLAT_FRACTION:
            faults.append(f"memory of {role} grew by {grown:.1%}, at most {FLAT_FRACTION:.0%}")
    return faults


def leftover_faults(start: dict[str, Sample], end: dict[str, Sample]) -> list[str]:
    """Descriptors and threads that have not gone back to what they were."""
    faults = []
    for role, before in start.items():
        after = end.get(role)
        if after is None:
            continue
        if after.descriptors > before.descriptors + MORE_DESCRIPTORS:
            faults.append(
                f"{role} has {after.descriptors} descriptors open, {before.descriptors} at the"
                f" start (at most {MORE_DESCRIPTORS} more)"
            )
        if after.threads > before.threads + MORE_THREADS:
            faults.append(
                f"{role} has {after.threads} threads, {before.threads} at the start"
                f" (at most {MORE_THREADS} more)"
            )
    return faults


def block_faults(start: Told, end: Told) -> list[str]:
    """Blocks that are in use though nobody asks for anything, or that are no more."""
    faults = []
    for rank, before in start.blocks.items():
        after = end.blocks.get(rank, {})
        if after.get("used", 0):
            faults.append(f"{rank} has {after['used']} KV blocks in use, and no request")
        if sum(after.values()) != sum(before.values()):
            faults.append(f"{rank} had {sum(before.values())} KV blocks, has {sum(after.values())}")
    if end.restarts > start.restarts:
        faults.append(f"{end.restarts - start.restarts} ranks were replaced")
    return faults
