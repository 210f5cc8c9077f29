"""Observers of a serving loop: due times and coalesced decodes, Retry-After, traces of batches."""

import itertools
import logging
import math

import pytest

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.observer import (
    FLUSH_AFTER_S,
    MARGIN_PASSES,
    MAX_RIDE_PASSES,
    AdmissionLimits,
    BatchTraces,
    DecodeCoalescer,
    RankAdmission,
)
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.telemetry.telemetry import Timeline
from contracts.config import PriorityConfig, ScheduleConfig
from contracts.errors import OverloadError
from contracts.logs import LineFormatter
from contracts.messages import Submit
from contracts.requests import Caller, Priority, Sampling
from contracts.traces import MAX_NAMES
from planner.scheduling.admission import SHORTEST_S
from planner.scheduling.batching import ALL_DECODES, BE_BATCH, LS_DECODES, BatchSelection, Phase
from tests.support.manual_clock import ManualClock

BLOCK = 16
LS = Priority.LS
CONFIG = PriorityConfig(ls_ttft_s=2.0, ls_tbt_s=0.2)


def submit(number: int, priority: Priority = LS, waited_s: float = 0.0, name: str = "") -> Submit:
    return Submit(
        request_id=number,
        token_ids=[number % 100, 1, 2],
        sampling=Sampling(max_tokens=50, temperature=0.0, ignore_eos=True),
        priority=priority,
        caller=Caller(b"", number if name else 1, name=name),
        waited_s=waited_s,
    )


def batch(number: int, *sequences: Sequence, formed_s: float = 0.0) -> ScheduledBatch:
    chunks = [Chunk(each, 0, 3, frozenset()) for each in sequences]
    return ScheduledBatch(number, LS, chunks, formed_s=formed_s)


# --- due times, and LS decodes that wait for each other while BE runs


class Decoding:
    """A scheduler with decoding LS sequences, and its coalescer."""

    def __init__(self, count: int) -> None:
        self.clock = ManualClock(100.0)
        self.scheduler = Scheduler(ScheduleConfig(), BlockManager(64))
        self.coalescer = DecodeCoalescer(CONFIG, self.scheduler, self.clock, 8)
        self.add(*range(count))
        self.run(0.0, BatchSelection((LS,), Phase.PREFILL))

    def add(self, *numbers: int, priority: Priority = LS) -> None:
        for number in numbers:
            self.scheduler.add(Sequence((0, number), submit(number, priority), BLOCK))

    def run(self, seconds: float, form: BatchSelection = LS_DECODES) -> ScheduledBatch:
        batch = self.scheduler.next_batch(form)
        assert batch is not None
        batch = batch._replace(formed_s=self.clock())
        self.clock.advance(seconds)
        for chunk in batch.chunks:
            chunk.sequence.token_ids.append(7)
        self.scheduler.complete(batch)
        self.coalescer.completed(batch)
        return batch


def test_decodes_wait_until_the_margin_before_their_due_time() -> None:
    rank = Decoding(2)
    rank.run(0.03)
    assert rank.coalescer.slack_s() == pytest.approx(0.2 - MARGIN_PASSES * 0.03)
    rank.clock.advance(0.15)
    assert rank.coalescer.slack_s() < 0


def test_earliest_idle_decode_sets_the_slack() -> None:
    rank = Decoding(2)
    rank.run(0.01)
    rank.scheduler.sequences[1].due_s -= 0.1
    assert rank.coalescer.slack_s() == pytest.approx(0.1 - MARGIN_PASSES * 0.01)
    batch = rank.scheduler.next_batch(LS_DECODES)
    assert batch is not None
    assert rank.coalescer.slack_s() == math.inf, "no decode is idle"


def test_loop_forms_batches_again_when_slack_ends() -> None:
    rank = Decoding(1)
    rank.run(0.05)
    before = rank.scheduler.changes
    rank.coalescer.stepped()
    slack_s = rank.coalescer.slack_s()
    rank.coalescer.stepped()
    assert rank.scheduler.changes == before
    rank.clock.advance(slack_s + 1e-6)
    for _ in range(2):
        rank.coalescer.stepped()
        assert rank.scheduler.changes == before + 1, "once"


def test_be_joins_while_passes_are_fast() -> None:
    rank = Decoding(2)
    assert rank.coalescer.free_places() < 0, "no pass has been timed"
    rank.run(0.2 / MAX_RIDE_PASSES + 0.001)
    assert rank.coalescer.free_places() < 0
    rank.run(0.01)
    assert rank.coalescer.free_places() == 8 - 2


def test_be_joins_only_if_ls_uses_at_most_half_a_batch() -> None:
    rank = Decoding(4)
    rank.run(0.01)
    rank.add(*range(10, 14), priority=Priority.BE)
    assert rank.coalescer.free_places() == 4
    rank.run(0.0, BE_BATCH)
    assert rank.coalescer.free_places() == 0
    batch = rank.run(0.01, ALL_DECODES)
    assert batch.priority is LS
    assert [chunk.sequence.priority for chunk in batch.chunks] == [LS] * 4 + [Priority.BE] * 4
    rank.add(99)
    rank.run(0.0, BatchSelection((LS,), Phase.PREFILL))
    assert rank.coalescer.free_places() < 0, "five of LS want more than half of eight places"


def test_first_token_is_due_from_ingress_arrival_and_the_next_after_the_last() -> None:
    clock = ManualClock(100.0)
    times = DecodeCoalescer(CONFIG, Scheduler(ScheduleConfig(), BlockManager(64)), clock, 8)
    decoding, chunked = (
        Sequence((0, number), submit(number, waited_s=0.75), BLOCK) for number in range(2)
    )
    decoding.token_ids.append(7)
    for each in (decoding, chunked):
        times.accepted(each)
        assert each.due_s == 101.25
    clock.advance(10.0)
    times.completed(batch(0, decoding, chunked))
    assert (decoding.due_s, chunked.due_s) == (110.2, 101.25), "a prompt keeps its due time"


# --- Retry-After of refused requests


class Queue:
    """A rank on a manual clock whose sequences end as soon as they start."""

    def __init__(self, max_waiting: int) -> None:
        self.clock = ManualClock(50.0)
        schedule = ScheduleConfig(max_batch_sequences=4, max_batch_tokens=64)
        self.scheduler = Scheduler(schedule, BlockManager(64, prefix_cache=False))
        limits = AdmissionLimits("rank", 100, 100, 1024, max_waiting)
        self.admission = RankAdmission(limits, self.scheduler, self.clock)
        self._numbers = itertools.count()

    def retry_after_s(self) -> float | None:
        """Return Retry-After; None: the request was queued."""
        number = next(self._numbers)
        try:
            self.admission.check(0, submit(number))
        except OverloadError as error:
            return error.retry_after_s
        sequence = Sequence((0, number), submit(number), BLOCK)
        self.admission.accepted(sequence)
        self.scheduler.add(sequence)
        return None

    def run(self, batches: int, seconds_each: float) -> None:
        for _ in range(batches):
            batch = self.scheduler.next_batch()
            assert batch is not None
            self.admission.formed(batch)
            self.clock.advance(seconds_each)
            for chunk in batch.chunks:
                chunk.sequence.done = True
            self.scheduler.complete(batch)


def test_retry_after_is_excess_over_start_rate() -> None:
    rank = Queue(max_waiting=40)
    assert [rank.retry_after_s() for _ in range(40)] == [None] * 40
    assert rank.retry_after_s() == SHORTEST_S, "nothing is known yet"
    rank.run(6, seconds_each=2.0)  # four of them, every two seconds
    for _ in range(24):
        rank.retry_after_s()
    retry_s = rank.retry_after_s()
    assert retry_s == SHORTEST_S, "one too many: in half a second there is a place"
    rate = rank.admission._rates[LS].per_second(rank.clock())
    assert rate is not None
    assert rate == pytest.approx(2.0, rel=0.4)
    assert rank.admission.retry_after_s(LS, 100) == pytest.approx(100 / rate)
    assert rank.admission.retry_after_s(Priority.BE, 100) == SHORTEST_S, (
        "of a class that has not run"
    )


# --- traces


def ended(number: int, name: str, *, done: bool = True) -> Sequence:
    made = Sequence((1, number), submit(number, name=name), BLOCK)
    made.done = done
    return made


def test_batch_span_names_its_requests() -> None:
    clock, timeline = ManualClock(1.5), Timeline(8)
    traces = BatchTraces("attention-0", timeline, clock)
    mixed = ended(1, "a"), ended(2, "b"), ended(3, "a"), ended(4, "")
    traces.completed(batch(7, *mixed, formed_s=1.0))
    traces.completed(batch(8, *(ended(number, f"r{number}") for number in range(MAX_NAMES + 5))))
    one, other = timeline.since("attention-0", 0.0).batches
    assert (one.number, one.start_s, one.end_s, one.tokens) == (7, 1.0, 1.5, 12)
    assert (one.requests, one.others) == (("a", "b"), 0)
    assert (len(other.requests), other.others) == (MAX_NAMES, 5)


def test_ended_request_is_logged_once_and_soon(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(1.0)
    traces = BatchTraces("attention-0", Timeline(8), clock)
    with caplog.at_level(logging.INFO, "tandem"):
        traces.completed(
            batch(1, ended(1, "a"), ended(2, "a"), ended(3, "b", done=False), ended(4, ""))
        )
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
