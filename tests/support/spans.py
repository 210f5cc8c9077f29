"""Time that spans cover, and communication in them that no computation hides."""

from collections.abc import Iterable, Sequence

from contracts.traces import TRANSFERS, Stage, TaskSpan

_COMPUTE = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.FINISH)


def busy_seconds(spans: Iterable[TaskSpan], stages: Sequence[Stage]) -> float:
    """Return the seconds in which at least one span of `stages` was running."""
    return length(union([(s.start_s, s.end_s) for s in spans if s.stage in stages]))


def exposed_communication(spans: Sequence[TaskSpan]) -> float:
    """Return the seconds of FinDEP's non-overlapped communication.

    This is the time covered by A2E or E2A spans and by no attention, shared or expert span of any
    rank in `spans`.
    """
    return busy_seconds(spans, (*_COMPUTE, *TRANSFERS)) - busy_seconds(spans, _COMPUTE)


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


def busy_ms(spans: Iterable[TaskSpan], resource: str) -> float:
    """Return the length of all spans of a resource."""
    return 1e3 * sum(span.end_s - span.start_s for span in spans if span.resource == resource)
