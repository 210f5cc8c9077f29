"""A ring of task spans per rank, and the Chrome trace of several rings."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from contracts.events import TRANSFERS, Stage, TaskSpan
from planner.findep.exposure import length, union


class Timeline:
    """Keeps the last `capacity` spans, and the seconds of each stage since the start.

    `observe` sees every span (for metrics). `exposed_s`: seconds so far in which the rank waited
    while a payload for it was under way.
    """

    def __init__(self, capacity: int, observe: Callable[[TaskSpan], None] | None = None) -> None:
        self._spans: deque[TaskSpan] = deque(maxlen=capacity)
        self._keep = capacity > 0
        self._observe = observe
        self.exposed_s = 0.0
        self.stage_seconds = {stage.value: 0.0 for stage in Stage}

    def add(self, span: TaskSpan) -> None:
        self.stage_seconds[span.stage] += span.end_s - span.start_s
        if self._keep:
            self._spans.append(span)
        if self._observe is not None:
            self._observe(span)

    def waited(
        self, start_s: float, end_s: float, transfers: Iterable[tuple[float, float]]
    ) -> None:
        """The rank waited from start_s to end_s, and `transfers` arrived in that time."""
        inside = [(max(start_s, sent), min(end_s, arrived)) for sent, arrived in transfers]
        self.exposed_s += length(union([(a, b) for a, b in inside if b > a]))

    def spans(self) -> list[TaskSpan]:
        return list(self._spans)


def write_chrome_trace(spans: Sequence[TaskSpan], path: Path) -> None:
    """Writes the spans as Chrome trace events (open in Perfetto): one track per rank and link.

    Spans of a link may overlap (several packets under way): those get "async" events.
    """
    resources = sorted({span.resource for span in spans})
    track = {resource: index + 1 for index, resource in enumerate(resources)}
    zero_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "tandem"}}
    ]
    for resource, tid in track.items():
        args = {"name": resource}
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": args})
        order = {"sort_index": tid}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": order})
    for number, span in enumerate(spans):
        events.extend(_trace_events(span, number, track[span.resource], zero_s))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _trace_events(span: TaskSpan, number: int, tid: int, zero_s: float) -> list[dict[str, object]]:
    name = f"{span.stage.value} L{span.layer} m{span.micro_batch}"
    if span.stage in (*TRANSFERS, Stage.EXPERT):
        name += f" g{span.token_group}"
    common: dict[str, object] = {"name": name, "cat": span.stage.value, "pid": 1, "tid": tid}
    start_us, end_us = (span.start_s - zero_s) * 1e6, (span.end_s - zero_s) * 1e6
    args = {"batch": span.batch, "layer": span.layer, "tokens": span.tokens}
    if span.stage not in TRANSFERS:
        return [{**common, "ph": "X", "ts": start_us, "dur": end_us - start_us, "args": args}]
    common["cat"], common["id"] = span.resource, number
    return [
        {**common, "ph": "b", "ts": start_us, "args": args},
        {**common, "ph": "e", "ts": end_us},
    ]
