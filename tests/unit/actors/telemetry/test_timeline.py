"""Recorded spans: seconds per stage, exposed communication, Chrome traces."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.telemetry.chrome_trace import write_chrome_trace
from actors.telemetry.timeline import Timeline
from contracts.traces import Stage, TaskSpan
from planner.schedule.exposed_communication import busy_seconds, exposed_communication


def span(stage: Stage, start_s: float, end_s: float, resource: str = "attention-0") -> TaskSpan:
    return TaskSpan(resource, stage, start_s, end_s, 3, 1, 2, 0, 40)


def test_empty_spans_expose_nothing() -> None:
    assert exposed_communication([]) == (0.0, 0.0)
    assert exposed_communication([span(Stage.A2E, 1.0, 1.0)]) == (0.0, 0.0)


intervals = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1]))
stages = st.sampled_from(
    [Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.FINISH, Stage.A2E, Stage.E2A]
)


@given(st.lists(st.tuples(stages, intervals), min_size=1, max_size=15))
def test_exposed_time_equals_count_by_second(
    drawn: list[tuple[Stage, tuple[int, int]]],
) -> None:
    spans = [span(stage, float(start), float(end)) for stage, (start, end) in drawn]
    moving = (Stage.A2E, Stage.E2A)

    def covered(second: int, communicating: bool) -> bool:
        return any(
            s.start_s <= second < s.end_s for s in spans if (s.stage in moving) == communicating
        )

    expected = sum(covered(t, True) and not covered(t, False) for t in range(41))
    exposed_s, fraction = exposed_communication(spans)
    assert exposed_s == pytest.approx(expected)
    assert 0.0 <= fraction <= 1.0
    busy = sum(covered(t, False) for t in range(41))
    compute = [stage for stage in Stage if stage not in moving]
    assert busy_seconds(spans, compute) == pytest.approx(busy)


def test_timeline_keeps_last_spans_and_total_seconds() -> None:
    seen: list[TaskSpan] = []
    timeline = Timeline(2, seen.append)
    for number in range(5):
        timeline.add(span(Stage.ATTENTION, number, number + 0.5))
    timeline.add(span(Stage.EXPERT, 9.0, 11.0))
    assert [s.start_s for s in timeline.spans()] == [4, 9.0]
    assert timeline.stage_seconds[Stage.ATTENTION] == pytest.approx(2.5)
    assert timeline.stage_seconds[Stage.EXPERT] == pytest.approx(2.0)
    assert len(seen) == 6


def test_only_the_part_of_a_transfer_within_a_wait_counts_as_exposed() -> None:
    timeline = Timeline(10)
    timeline.record_wait(10.0, 20.0, [(5.0, 12.0), (11.0, 13.0), (19.0, 25.0), (1.0, 2.0)])
    assert timeline.exposed_s == pytest.approx(4.0)
    timeline.record_wait(30.0, 31.0, [])
    assert timeline.exposed_s == pytest.approx(4.0)


def test_trace_has_complete_events_for_ranks_and_pairs_for_links(tmp_path: Path) -> None:
    spans = [
        span(Stage.ATTENTION, 100.0, 100.5),
        span(Stage.WAIT, 100.5, 101.0),
        span(Stage.A2E, 100.5, 100.75, "attention-0>expert-0"),
        span(Stage.A2E, 100.6, 100.7, "attention-0>expert-0"),  # overlaps the one before
        span(Stage.E2A, 100.8, 100.9, "expert-0>attention-0"),
        span(Stage.EXPERT, 100.7, 100.8, "expert-0"),
    ]
    path = tmp_path / "trace.json"
    write_chrome_trace(spans, path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    by_phase = Counter(event["ph"] for event in events)
    assert (by_phase["X"], by_phase["b"], by_phase["e"]) == (3, 3, 3)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted({s.resource for s in spans})
    begins = {(e["cat"], e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "b"}
    ends = {(e["cat"], e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 3
    assert all(begins[key] <= ends[key] for key in begins)
    complete = {e["name"]: (e["ts"], e["dur"], names[e["tid"]]) for e in events if e["ph"] == "X"}
    ts, dur, resource = complete["expert L1 m2 g0"]
    assert (ts, dur) == (pytest.approx(0.7e6), pytest.approx(0.1e6))
    assert resource == "expert-0"
