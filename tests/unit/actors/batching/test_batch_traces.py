"""Trace spans of batches, and log lines of ended requests."""

from __future__ import annotations

import logging

import pytest

from actors.batching.batch_traces import FLUSH_AFTER_S, BatchTraces
from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence
from actors.telemetry.timeline import Timeline
from contracts.logs import LineFormatter
from contracts.messages import Submit
from contracts.requests import Caller, Priority, Sampling
from contracts.traces import MAX_NAMES
from tests.support.manual_clock import ManualClock


def sequence(number: int, name: str, *, done: bool = True) -> Sequence:
    caller = Caller(request=number, name=name)
    submit = Submit(request_id=number, token_ids=[1, 2, 3], sampling=Sampling(), caller=caller)
    made = Sequence((1, number), submit, 16)
    made.done = done
    return made


def batch(number: int, *sequences: Sequence) -> ScheduledBatch:
    chunks = [Chunk(each, 0, 3, frozenset()) for each in sequences]
    return ScheduledBatch(number, Priority.LS, chunks)


def test_batch_span_names_its_requests() -> None:
    clock, timeline = ManualClock(1.0), Timeline(8)
    traces = BatchTraces("attention-0", timeline, clock)
    first = batch(7, sequence(1, "a"), sequence(2, "b"), sequence(3, "a"), sequence(4, ""))
    traces.formed(first)
    clock.advance(0.5)
    traces.completed(first)
    many = batch(8, *(sequence(number, f"r{number}") for number in range(MAX_NAMES + 5)))
    traces.formed(many)
    traces.completed(many)
    dropped = batch(9, sequence(1, "a"))
    traces.formed(dropped)
    traces.dropped(dropped)
    one, other = timeline.since("attention-0", 0.0).batches
    assert (one.number, one.start_s, one.end_s, one.tokens) == (7, 1.0, 1.5, 12)
    assert (one.requests, one.others) == (("a", "b"), 0)
    assert (len(other.requests), other.others) == (MAX_NAMES, 5)


def test_empty_ring_keeps_nothing() -> None:
    timeline = Timeline(0)
    traces = BatchTraces("attention-0", timeline, ManualClock())
    one = batch(1, sequence(1, "a"))
    traces.formed(one)
    traces.completed(one)
    assert timeline.since("attention-0", 0.0).batches == []


def test_ended_request_is_logged_once_and_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock(1.0)
    traces = BatchTraces("attention-0", Timeline(8), clock)
    with caplog.at_level(logging.INFO, "tandem"):
        ended = [sequence(1, "a"), sequence(2, "a"), sequence(3, "b", done=False)]
        traces.completed(batch(1, *ended, sequence(4, "")))
        traces.stepped()
        assert not caplog.records
        clock.advance(2 * FLUSH_AFTER_S)
        traces.stepped()
        traces.stepped()
    (record,) = caplog.records
    line = LineFormatter(has_traces=False).format(record)
    assert "tandem.requests sequences_ended request_id=a rank=attention-0 sequences=2" in line
    assert "prompt_tokens=6" in line
    assert "\n" not in line
