"""Traces of ranks whose clocks differ, or that do not answer."""

from concurrent.futures import Future

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.telemetry.telemetry import Timeline
from cluster.fleet import tracing
from cluster.fleet.tracing import TraceLock, estimate_offset, gather_traces, trace_answer
from contracts.clock import monotonic_s
from contracts.traces import BatchSpan, Stage, TaskSpan, boot_identity
from tests.support.manual_clock import ManualClock
from tests.support.started_ranks import StartedRank

AHEAD_S = 1000.0


def traced_rank(name: str, ahead_s: float = 0.0, boot: str = "") -> tuple[StartedRank, Timeline]:
    """Return a rank whose clock is ahead of ours; boot: the identity of its kernel."""
    timeline = Timeline(4)
    rank = StartedRank(name)
    rank.answers = {
        "clock_s": lambda: monotonic_s() + ahead_s,
        "trace": lambda since_s: msgspec.structs.replace(timeline.since(name, since_s), boot=boot),
    }
    return rank, timeline


round_trips = st.tuples(st.floats(0, 1e5), st.floats(0, 0.01), st.floats(0, 0.01))


@given(st.lists(round_trips, min_size=1, max_size=12), st.floats(-1e5, 1e5))
def test_offset_is_within_its_uncertainty(
    ways: list[tuple[float, float, float]], ahead_s: float
) -> None:
    """ways: time of each request, and how long it and its reply took."""
    rounds = [
        (sent_s, sent_s + there_s + ahead_s, sent_s + there_s + back_s)
        for sent_s, there_s, back_s in ways
    ]
    found = estimate_offset(rounds, same_boot=False)
    assert abs(found.offset_ms - 1e3 * ahead_s) <= found.uncertainty_ms + 1e-6
    quickest_ms = 1e3 * min(there + back for _, there, back in ways)
    assert found.uncertainty_ms == pytest.approx(quickest_ms / 2, abs=1e-6)


def test_clock_of_one_kernel_is_shared_unless_round_trips_contradict() -> None:
    assert estimate_offset([(1.0, 1.0005, 1.001)], same_boot=True).is_shared
    assert not estimate_offset([(1.0, 1.0005, 1.001)], same_boot=False).is_shared
    contradicted = estimate_offset([(1.0, 9.0, 1.001)], same_boot=True)
    assert not contradicted.is_shared
    assert contradicted.applied_s == pytest.approx(8.0, abs=0.001)


def test_spans_are_shifted_to_our_clock_and_name_their_requests() -> None:
    attention, attention_timeline = traced_rank("attention-0", AHEAD_S)
    expert, expert_timeline = traced_rank("expert-0", boot=boot_identity())
    now_s = monotonic_s()
    there_s = now_s + AHEAD_S
    attention_timeline.add(
        TaskSpan("attention-0", Stage.ATTENTION, there_s, there_s + 0.5, batch=3, tokens=9)
    )
    attention_timeline.add_batch(
        BatchSpan("attention-0", 3, there_s, there_s + 1.0, 9, "ls", ("request-a",))
    )
    expert_timeline.add(
        TaskSpan("expert-0", Stage.EXPERT, now_s, now_s + 0.25, batch=3, of=(("attention-0", 3),))
    )
    expert_timeline.add(TaskSpan("attention-0>expert-0", Stage.A2E, now_s, now_s + 0.1, batch=3))
    found = gather_traces([attention, expert], now_s - 1.0, monotonic_s, spans=True)
    answer = trace_answer(found, 1.0, 2)
    events = msgspec.json.decode(answer.events)
    tasks = {event["cat"]: event for event in events if event["ph"] == "X"}
    assert tasks["attention"]["ts"] == pytest.approx(now_s * 1e6, abs=5e4)
    assert tasks["attention"]["dur"] == pytest.approx(5e5)
    assert tasks["expert"]["ts"] == pytest.approx(now_s * 1e6, abs=1e-3), "not moved by noise"
    assert {task["args"]["requests"] for task in tasks.values()} == {"request-a"}
    (link,) = (
        event
        for event in events
        if event.get("cat") == "attention-0>expert-0" and event["ph"] == "b"
    )
    assert link["args"]["requests"] == "request-a"
    assert {event["pid"] for event in events} == {2, 3}
    clock = answer.note.ranks["attention-0"].clock
    assert abs(clock.offset_ms - 1e3 * AHEAD_S) <= clock.uncertainty_ms + 1e-3
    assert answer.note.ranks["expert-0"].clock.is_shared
    assert answer.note.missing == {}


def test_silent_rank_is_named_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOCK_TIMEOUT_S", 0.05)
    silent, (answering, _) = StartedRank("expert-0"), traced_rank("attention-0")
    silent.answers = {"clock_s": Future(), "trace": Future()}
    found = gather_traces([silent, answering], 0.0, monotonic_s, spans=True)
    answer = trace_answer(found, 1.0, 2)
    assert list(answer.note.missing) == ["expert-0"]
    assert "no answer" in answer.note.missing["expert-0"]
    assert list(answer.note.ranks) == ["attention-0"]
    assert b"expert-0: missing, no answer" in bytes(answer.events)


def test_overwritten_spans_are_reported_and_a_clock_only_trace_has_none() -> None:
    rank, timeline = traced_rank("expert-0")
    for number in range(5):
        timeline.add(TaskSpan("expert-0", Stage.EXPERT, number, number + 0.5))
    cut, whole = timeline.since("expert-0", 0.0), timeline.since("expert-0", 2.0)
    assert ([span.start_s for span in cut.spans], cut.is_cut) == ([1, 2, 3, 4], True)
    assert ([span.start_s for span in whole.spans], whole.is_cut) == ([2, 3, 4], False)
    answer = trace_answer(gather_traces([rank], 0.0, monotonic_s, spans=False), 0.0, 2)
    assert answer.note.ranks["expert-0"].spans == 0


def test_one_trace_is_made_at_a_time() -> None:
    clock = ManualClock()
    traces = TraceLock(clock)
    assert traces.begin(5.0) is None
    clock.advance(2.0)
    assert traces.begin(5.0) == 3.0
    traces.end()
    assert traces.begin(5.0) is None
