"""Retry-After of refused requests."""

import itertools
import logging

import pytest

from actors.batching.admission import QueueDrain, RankAdmission
from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.observer import FLUSH_AFTER_S, BatchTraces
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.telemetry.telemetry import Timeline
from contracts.config import ScheduleConfig
from contracts.errors import OverloadError
from contracts.logs import LineFormatter
from contracts.messages import Submit
from contracts.requests import Caller, Priority, Sampling
from contracts.traces import MAX_NAMES
from planner.scheduling.admission import SHORTEST_S
from tests.support.manual_clock import ManualClock

BLOCK = 16


class Rank:
    """A rank on a manual clock whose sequences end as soon as they start."""

    def __init__(self, max_waiting: int) -> None:
        self.now_s = 50.0
        limits = ScheduleConfig(max_batch_sequences=4, max_batch_tokens=64)
        self.scheduler = Scheduler(limits, BlockManager(64, prefix_cache=False))
        self.drain = QueueDrain(self.scheduler, lambda: self.now_s)
        self.admission = RankAdmission(
            "rank", 100, 100, 1024, max_waiting, self.drain.retry_after_s
        )
        self._numbers = itertools.count()

    def retry_after_s(self, priority: Priority = Priority.LS) -> float | None:
        """Return Retry-After; None: the request was queued."""
        number = next(self._numbers)
        submit = Submit(
            request_id=number,
            token_ids=[1],
            sampling=Sampling(max_tokens=1, temperature=0.0),
            priority=priority,
            caller=Caller(b"", 1),
        )
        try:
            self.admission.check(0, submit, self.scheduler)
        except OverloadError as error:
            return error.retry_after_s
        sequence = Sequence((0, number), submit, BLOCK)
        self.drain.accepted(sequence)
        self.scheduler.add(sequence)
        return None

    def run(self, batches: int, seconds_each: float) -> None:
        for _ in range(batches):
            batch = self.scheduler.next_batch()
            assert batch is not None
            self.drain.formed(batch)
            self.now_s += seconds_each
            for chunk in batch.chunks:
                chunk.sequence.done = True
            self.scheduler.complete(batch)


def test_retry_after_is_excess_over_start_rate() -> None:
    rank = Rank(max_waiting=40)
    assert [rank.retry_after_s() for _ in range(40)] == [None] * 40
    assert rank.retry_after_s() == SHORTEST_S, "nothing is known yet"
    rank.run(6, seconds_each=2.0)  # four of them, every two seconds
    for _ in range(24):
        rank.retry_after_s()
    retry_s = rank.retry_after_s()
    assert retry_s == SHORTEST_S, "one too many: in half a second there is a place"
    rate = rank.drain._rates[Priority.LS].per_second(rank.now_s)
    assert rate is not None
    assert rate == pytest.approx(2.0, rel=0.4)
    assert rank.drain.retry_after_s(Priority.LS, 100) == pytest.approx(100 / rate)
    assert rank.drain.retry_after_s(Priority.BE, 100) == SHORTEST_S, "of a class that has not run"


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


def test_ended_request_is_logged_once_and_soon(caplog: pytest.LogCaptureFixture) -> None:
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
