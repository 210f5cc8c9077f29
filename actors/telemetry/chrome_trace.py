"""Chrome trace events, for Perfetto: a process per rank, a track for its tasks and one per link.

Overlapping spans, batches and packets in transfer, are "async" events. Times of several clocks are
shifted onto one: `shift_s` is the offset of each.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.traces import TRANSFERS, BatchSpan, RankTrace, RequestSpan, Stage, TaskSpan

TraceEvent = dict[str, Any]
BatchRequests = Mapping[tuple[str, int], Sequence[str]]  # (rank, number of a batch) -> its requests

MAX_SHOWN = 4  # requests in the arguments of a task
_TASKS, _BATCHES = 1, 2  # tracks of a rank


def write_chrome_trace(spans: Sequence[TaskSpan], path: Path) -> None:
    """Write a trace with one track per rank and link. Spans of a link may overlap."""
    resources = sorted({span.resource for span in spans})
    zero_s = min((span.start_s for span in spans), default=0.0)
    events = _process(1, "tandem")
    for tid, resource in enumerate(resources, _TASKS):
        events += _track(1, tid, resource)
    for number, span in enumerate(spans):
        tid = _TASKS + resources.index(span.resource)
        events.extend(_task(span, number, (1, tid), zero_s, ()))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def requests_by_batch(traces: Iterable[RankTrace]) -> BatchRequests:
    return {
        (batch.rank, batch.number): batch.requests for trace in traces for batch in trace.batches
    }


def rank_events(
    trace: RankTrace, pid: int, shift_s: float, names: BatchRequests
) -> list[TraceEvent]:
    """Return the events of one rank, as process `pid`. names: of all ranks' batches."""
    events = _process(pid, trace.rank)
    links = sorted({span.resource for span in trace.spans} - {trace.rank})
    tracks = {trace.rank: _TASKS} | {link: _BATCHES + 1 + at for at, link in enumerate(links)}
    events += _track(pid, _BATCHES, "batches") if trace.batches else []
    for resource, tid in tracks.items():
        events += _track(pid, tid, "tasks" if tid == _TASKS else resource)
    for number, span in enumerate(trace.spans):
        place = pid, tracks[span.resource]
        events.extend(_task(span, number, place, shift_s, _requests(span, names)))
    for batch in trace.batches:
        events.extend(_batch(batch, pid, shift_s))
    return events


def request_events(spans: Iterable[RequestSpan], pid: int, shift_s: float) -> list[TraceEvent]:
    """Return the events of an ingress: each request, and its time to the first token."""
    events = _process(pid, "ingress")
    for number, span in enumerate(spans):
        common = {"cat": "request", "id": number, "pid": pid, "tid": 1}
        args = {"request_id": span.name, "class": span.priority, "outcome": span.outcome}
        times_s = [(f"{span.pipeline} {span.name}", span.start_s, span.end_s)]
        if span.first_s is not None:
            times_s.append(("to first token", span.start_s, span.first_s))
        for name, start_s, end_s in times_s:
            times_us = _us(start_s, shift_s), _us(end_s, shift_s)
            events += _pair({**common, "name": name}, times_us, args)
    return events


def missing_events(name: str, pid: int, reason: str) -> list[TraceEvent]:
    """Return a process without tracks, whose name contains the reason."""
    return _process(pid, f"{name}: missing, {reason}")


def _requests(span: TaskSpan, names: BatchRequests) -> Sequence[str]:
    """Return the requests of a task: of its batch, of merged batches, or of a link's ends."""
    batches = span.of or [(end, span.batch) for end in span.resource.split(">")]
    found = [name for key in batches for name in names.get(key, ())]
    return list(dict.fromkeys(found))


def _task(
    span: TaskSpan, number: int, place: tuple[int, int], zero_s: float, requests: Sequence[str]
) -> Iterator[TraceEvent]:
    name = f"{span.stage.value} L{span.layer} m{span.micro_batch}"
    if span.stage in (*TRANSFERS, Stage.EXPERT):
        name += f" g{span.token_group}"
    common: TraceEvent = {"name": name, "cat": span.stage.value, "pid": place[0], "tid": place[1]}
    start_us, end_us = _us(span.start_s, zero_s), _us(span.end_s, zero_s)
    args: TraceEvent = {"batch": span.batch, "layer": span.layer, "tokens": span.tokens}
    if requests:
        more = f" and {len(requests) - MAX_SHOWN} more" if len(requests) > MAX_SHOWN else ""
        args["requests"] = " ".join(requests[:MAX_SHOWN]) + more
    if span.stage not in TRANSFERS:
        yield {**common, "ph": "X", "ts": start_us, "dur": end_us - start_us, "args": args}
        return
    common["cat"], common["id"] = span.resource, number
    yield from _pair(common, (start_us, end_us), args)


def _pair(common: TraceEvent, times_us: tuple[float, float], args: TraceEvent) -> list[TraceEvent]:
    """Return the begin and the end of an "async" event."""
    start_us, end_us = times_us
    return [
        {**common, "ph": "b", "ts": start_us, "args": args},
        {**common, "ph": "e", "ts": end_us},
    ]


def _batch(batch: BatchSpan, pid: int, shift_s: float) -> list[TraceEvent]:
    common: TraceEvent = {
        "name": f"batch {batch.number}",
        "cat": f"{batch.rank} batches",
        "id": batch.number,
        "pid": pid,
        "tid": _BATCHES,
    }
    args = {
        "tokens": batch.tokens,
        "class": batch.priority,
        "requests": " ".join(batch.requests),
        "other_requests": batch.others,
    }
    return _pair(common, (_us(batch.start_s, shift_s), _us(batch.end_s, shift_s)), args)


def _track(pid: int, tid: int, name: str) -> list[TraceEvent]:
    common: TraceEvent = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**common, "name": "thread_name", "args": {"name": name}},
        {**common, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _process(pid: int, name: str) -> list[TraceEvent]:
    common: TraceEvent = {"ph": "M", "pid": pid}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _us(at_s: float, zero_s: float) -> float:
    return (at_s - zero_s) * 1e6
