"""Due times of tokens, and LS decodes that wait for each other while BE runs."""

import math
from collections.abc import Iterable

import pytest

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.decode_coalescing import (
    MARGIN_PASSES,
    MAX_RIDE_PASSES,
    DecodeCoalescer,
    DueTimes,
)
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from contracts.config import PriorityConfig, ScheduleConfig
from contracts.messages import Submit
from contracts.requests import Priority, Sampling
from planner.scheduling.batching import ALL_DECODES, BE_BATCH, LS_DECODES, BatchSelection, Phase
from tests.support.manual_clock import ManualClock

LS = Priority.LS


class Rank:
    """A scheduler with decoding LS sequences, and its coalescer."""

    def __init__(self, count: int) -> None:
        self.clock = ManualClock(100.0)
        self.scheduler = Scheduler(ScheduleConfig(), BlockManager(64))
        config = PriorityConfig(ls_tbt_s=0.2)
        self.coalescer = DecodeCoalescer(config, self.scheduler, self.clock, 8)
        for number in range(count):
            self.scheduler.add(Sequence((0, number), submit(number), 16))
        first = self.scheduler.next_batch()
        assert first is not None
        self.end(first)

    def run(self, seconds: float) -> ScheduledBatch:
        """Run a pass of decodes."""
        batch = self.scheduler.next_batch(LS_DECODES)
        assert batch is not None
        self.coalescer.formed(batch)
        self.clock.advance(seconds)
        self.end(batch)
        return batch

    def end(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            chunk.sequence.token_ids.append(7)
            chunk.sequence.due_s = self.clock() + 0.2
        self.scheduler.complete(batch)
        self.coalescer.completed(batch)


def submit(number: int, priority: Priority = LS) -> Submit:
    sampling = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)
    return Submit(request_id=number, token_ids=[number, 1, 2], sampling=sampling, priority=priority)


def test_decodes_wait_until_the_margin_before_their_due_time() -> None:
    rank = Rank(2)
    rank.run(0.03)
    assert rank.coalescer.slack_s() == pytest.approx(0.2 - MARGIN_PASSES * 0.03)
    rank.clock.advance(0.15)
    assert rank.coalescer.slack_s() < 0


def test_earliest_idle_decode_sets_the_slack() -> None:
    rank = Rank(2)
    rank.run(0.01)
    rank.scheduler.sequences[1].due_s -= 0.1
    assert rank.coalescer.slack_s() == pytest.approx(0.1 - MARGIN_PASSES * 0.01)
    batch = rank.scheduler.next_batch(LS_DECODES)
    assert batch is not None
    assert rank.coalescer.slack_s() == math.inf, "nobody waits"


def test_loop_forms_batches_again_when_slack_ends() -> None:
    rank = Rank(1)
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
    rank = Rank(2)
    assert rank.coalescer.free_places() < 0, "no pass has been timed"
    rank.run(0.2 / MAX_RIDE_PASSES + 0.001)
    assert rank.coalescer.free_places() < 0
    rank.run(0.01)
    assert rank.coalescer.free_places() == 8 - 2


def test_be_joins_only_if_ls_uses_at_most_half_a_batch() -> None:
    rank = Rank(4)
    rank.run(0.01)
    for number in range(10, 14):
        rank.scheduler.add(Sequence((0, number), submit(number, Priority.BE), 16))
    assert rank.coalescer.free_places() == 4
    be_batch = rank.scheduler.next_batch(BE_BATCH)
    assert be_batch is not None
    rank.end(be_batch)
    assert rank.coalescer.free_places() == 0
    batch = rank.scheduler.next_batch(ALL_DECODES)
    assert batch is not None
    assert batch.priority is LS
    assert [chunk.sequence.priority for chunk in batch.chunks] == [LS] * 4 + [Priority.BE] * 4
    rank.end(batch)
    rank.scheduler.add(Sequence((0, 99), submit(99), 16))
    fifth = rank.scheduler.next_batch(BatchSelection((LS,), Phase.PREFILL))
    assert fifth is not None
    rank.end(fifth)
    assert rank.coalescer.free_places() < 0, "five of LS want more than half of eight places"


CONFIG = PriorityConfig(ls_ttft_s=2.0, ls_tbt_s=0.5)


def sequence(priority: Priority, waited_s: float = 0.0, generated: int = 0) -> Sequence:
    submit = Submit(
        request_id=0, token_ids=[1, 2, 3], sampling=None, priority=priority, waited_s=waited_s
    )
    made = Sequence((0, 0), submit, 16)
    made.token_ids += [7] * generated
    return made


def batch(priority: Priority, sequences: Iterable[Sequence]) -> ScheduledBatch:
    return ScheduledBatch(0, priority, [Chunk(s, 0, 1, frozenset()) for s in sequences])


def test_first_token_is_due_from_ingress_arrival() -> None:
    times = DueTimes(CONFIG, ManualClock(100.0))
    late = sequence(Priority.LS, waited_s=0.75)
    times.accepted(late)
    assert late.due_s == 101.25


def test_next_token_is_due_after_the_last_and_prompt_keeps_its_due_time() -> None:
    clock = ManualClock(100.0)
    times = DueTimes(CONFIG, clock)
    decoding, chunked = sequence(Priority.LS, generated=1), sequence(Priority.LS)
    for each in (decoding, chunked):
        times.accepted(each)
    clock.advance(10.0)
    times.completed(batch(Priority.LS, [decoding, chunked]))
    assert (decoding.due_s, chunked.due_s) == (110.5, 102.0)
