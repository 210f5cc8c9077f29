"""Retry-After of refused requests."""

from __future__ import annotations

import itertools

import pytest

from actors.batching.admission import QueueDrain, RankAdmission
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from cluster.routing.ticket import failure_of
from contracts.config import ScheduleConfig
from contracts.errors import OverloadError
from contracts.messages import Failed, Submit
from contracts.requests import Caller, Priority, Sampling
from planner.scheduling.drain_rate import SHORTEST_S

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


def test_client_receives_retry_after_on_both_paths() -> None:
    failed = Failed(7, OverloadError.code, "rank: full", 429, 12.5)
    error = failure_of(failed)
    assert isinstance(error, OverloadError)
    assert (error.message, error.retry_after_s) == ("rank: full", 12.5)
    assert isinstance(failure_of(Failed(7, "peer_lost", "gone", 503)), Exception)
