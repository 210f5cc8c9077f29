"""Communication that is not hidden by computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.traces import TRANSFERS, Stage, TaskSpan

_COMPUTE = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.FINISH)


def busy_seconds(spans: Iterable[TaskSpan], stages: Sequence[Stage]) -> float:
    """Return the seconds in which at least one span of `stages` was running."""
    return length(union([(s.start_s, s.end_s) for s in spans if s.stage in stages]))


def exposed_communication(spans: Sequence[TaskSpan]) -> tuple[float, float]:
    """Return the seconds of exposed communication, and their fraction of the makespan.

    FinDEP's non-overlapped communication: time covered by A2E or E2A spans and by no attention,
    shared or expert span of any rank in `spans`.
    """
    if not spans:
        return 0.0, 0.0
    compute = [(s.start_s, s.end_s) for s in spans if s.stage in _COMPUTE]
    communication = [(s.start_s, s.end_s) for s in spans if s.stage in TRANSFERS]
    exposed_s = length(union(compute + communication)) - length(union(compute))
    makespan_s = max(s.end_s for s in spans) - min(s.start_s for s in spans)
    return exposed_s, exposed_s / makespan_s if makespan_s else 0.0


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint ordered intervals that cover the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)
