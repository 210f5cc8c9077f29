"""Due times of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

from actors.batching.decode_coalescing import DueTimes
from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence
from contracts.config import PriorityConfig
from contracts.messages import Submit
from contracts.requests import Priority
from tests.support.manual_clock import ManualClock

CONFIG = PriorityConfig(ls_ttft_s=2.0, ls_tbt_s=0.5)
PROMPT = [1, 2, 3]


def sequence(priority: Priority, waited_s: float = 0.0, generated: int = 0) -> Sequence:
    submit = Submit(
        request_id=0, token_ids=list(PROMPT), sampling=None, priority=priority, waited_s=waited_s
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


def test_best_effort_is_never_due() -> None:
    times = DueTimes(CONFIG, ManualClock(100.0))
    flexible = sequence(Priority.BE, generated=1)
    times.accepted(flexible)
    for priority in Priority:
        times.completed(batch(priority, [flexible]))
    assert flexible.due_s == math.inf
