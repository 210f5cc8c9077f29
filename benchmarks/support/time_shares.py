"""Where a rank's time went: seconds that add up to the wall time, from the spans it recorded.

    |---- ATTENTION ----|SEND|     WAIT      |---- ATTENTION ----| ...
    |products|  other   |    | idle |exposed |                   |between

Exposed: the rank waited while a payload for it was under way (from the sender's first byte until it
was here). Idle: it waited for the other group to compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contracts.traces import Stage, TaskSpan
from planner.schedule.exposed_communication import length, union

Interval = tuple[float, float]

_COMPUTE = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT)
_TRANSFER = (Stage.A2E, Stage.E2A)


class Ideal(NamedTuple):
    """Seconds of a rank's matrix products at the machine's rate: of its stages, of FINISH."""

    stages_s: float
    finish_s: float


class Shares(NamedTuple):
    """Seconds of one rank in a window. The fields but the last add up to `wall_s`."""

    products_s: float  # matrix products, had they run at the machine's rate
    other_compute_s: float  # the rest of attention, shared and expert stages
    send_s: float
    finish_s: float  # logits' product aside
    exposed_s: float
    idle_s: float
    between_s: float  # no span: the loop, scheduling, clients
    wall_s: float


ROWS = {
    "products_s": "matrix products at the machine's rate",
    "other_compute_s": "rest of the attention and expert stages",
    "send_s": "cutting and sending packets",
    "finish_s": "sampling and answers",
    "exposed_s": "waiting, a payload under way",
    "idle_s": "waiting for the other group",
    "between_s": "between tasks: loop, scheduling, clients",
}


def shares(
    spans: Sequence[TaskSpan],
    rank: str,
    window: Interval,
    ideal: Ideal,
    *,
    poll_s: float = math.inf,
) -> Shares:
    """Of `rank` in `window` (monotonic seconds).

    poll_s: an expert rank records no wait that ended without a payload, after that time: gaps of
    that length count as waits.
    """
    own = [span for span in spans if span.resource == rank]
    seconds = {stage: _covered(own, (stage,), window) for stage in Stage}
    waits = _clip([(s.start_s, s.end_s) for s in own if s.stage is Stage.WAIT], window)
    gaps = _gaps([(s.start_s, s.end_s) for s in own], window)
    waits = union([*waits, *(gap for gap in gaps if gap[1] - gap[0] >= poll_s)])
    arriving = _clip(
        [
            (s.start_s, s.end_s)
            for s in spans
            if s.stage in _TRANSFER and s.resource.endswith(f">{rank}")
        ],
        window,
    )
    exposed_s = length(waits) + length(arriving) - length(union([*waits, *arriving]))
    compute_s = sum(seconds[stage] for stage in _COMPUTE)
    products_s = min(compute_s, ideal.stages_s)
    head_s = min(seconds[Stage.FINISH], ideal.finish_s)
    wall_s = window[1] - window[0]
    known_s = compute_s + seconds[Stage.SEND] + seconds[Stage.FINISH] + length(waits)
    return Shares(
        products_s=products_s + head_s,
        other_compute_s=compute_s - products_s,
        send_s=seconds[Stage.SEND],
        finish_s=seconds[Stage.FINISH] - head_s,
        exposed_s=exposed_s,
        idle_s=length(waits) - exposed_s,
        between_s=wall_s - known_s,
        wall_s=wall_s,
    )


def total(parts: Sequence[Shares]) -> Shares:
    """The sum of several windows."""
    return Shares(*(sum(values) for values in zip(*parts, strict=True)))


def _covered(spans: Iterable[TaskSpan], stages: Sequence[Stage], window: Interval) -> float:
    return length(_clip([(s.start_s, s.end_s) for s in spans if s.stage in stages], window))


def _clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    inside = [(max(a, window[0]), min(b, window[1])) for a, b in intervals]
    return union([(a, b) for a, b in inside if b > a])


def _gaps(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of the window no interval covers."""
    busy = [(window[0], window[0]), *_clip(intervals, window), (window[1], window[1])]
    edges = union(busy)
    return [(a[1], b[0]) for a, b in itertools.pairwise(edges)]
