"""Batching policies."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from contracts.requests import Priority
from planner.scheduling.batching import (
    ALL,
    ALL_DECODES,
    BE_BATCH,
    BEST_EFFORT_STARTS,
    LS_DECODES,
    LS_PROMPTS,
    BatchSelection,
    LiveBatch,
    Phase,
    SequenceView,
    WaitingWork,
    by_class,
    coalesce_decodes,
    joining,
    one_at_a_time,
    preempt_if_profitable,
)


class View(NamedTuple):
    """Live batches of one class, by the remaining ones of 8 layers."""

    left: tuple[int, ...]
    layers: int = 8
    free_blocks: int = 4
    running: int = 0
    idle: tuple[SequenceView, ...] = ()

    @property
    def in_flight(self) -> int:
        return len(self.left)

    @property
    def live(self) -> list[LiveBatch]:
        return [LiveBatch(Priority.LS, 16, left) for left in self.left]

    def count(self, priority: Priority) -> int:
        return int(priority is Priority.LS)

    def waiting(self, priority: Priority) -> WaitingWork:
        return WaitingWork(1, 16)


@pytest.mark.parametrize(("left", "forms"), [((), True), ((8,), False), ((1, 2), False)])
def test_one_at_a_time_waits_for_any_live_batch(left: tuple[int, ...], forms: bool) -> None:
    assert bool(one_at_a_time(View(left))) is forms


@pytest.mark.parametrize(
    ("left", "forms"),
    [
        ((), True),
        ((8,), True),
        ((6,), True),
        ((5,), False),  # one more layer than another may have to catch up
        ((8, 5), False),
        ((8, 8), False),  # there are as many as may be
    ],
)
def test_batch_joins_within_the_layer_limit(left: tuple[int, ...], forms: bool) -> None:
    assert bool(joining(most=2, within_layers=2)(View(left))) is forms
    if forms:
        assert joining(most=3, within_layers=8)(View((*left, 1)))


class Classes(NamedTuple):
    """Sequences of each class and live batches."""

    ls: int
    be: int
    live: tuple[LiveBatch, ...] = ()
    layers: int = 8
    free_blocks: int = 4
    running: int = 0
    idle: tuple[SequenceView, ...] = ()

    @property
    def in_flight(self) -> int:
        return len(self.live)

    def count(self, priority: Priority) -> int:
        return self.ls if priority is Priority.LS else self.be

    def waiting(self, priority: Priority) -> WaitingWork:
        return WaitingWork(self.count(priority), 16)


def live(priority: Priority, phase: Phase | None = None) -> LiveBatch:
    return LiveBatch(priority, 16, 4, phase=phase)


@pytest.mark.parametrize(("ls", "be"), [(3, 0), (0, 3), (0, 0)])
def test_single_class_runs_one_mixed_batch_at_a_time(ls: int, be: int) -> None:
    assert tuple(by_class(Classes(ls, be))) == (ALL,)
    runs = live(Priority.LS if ls else Priority.BE)
    assert not tuple(by_class(Classes(ls, be, (runs,))))


@pytest.mark.parametrize(
    ("running", "forms"),
    [
        ((), [LS_DECODES, LS_PROMPTS, BE_BATCH]),
        ((live(Priority.BE),), [LS_DECODES, LS_PROMPTS]),
        ((live(Priority.LS, Phase.DECODE),), [LS_PROMPTS, BE_BATCH]),
        ((live(Priority.LS, Phase.PREFILL),), [LS_DECODES, BE_BATCH]),
        ((live(Priority.LS),), [BE_BATCH]),  # of both phases, from when LS was alone
        (
            (
                live(Priority.LS, Phase.DECODE),
                live(Priority.LS, Phase.PREFILL),
                live(Priority.BE),
            ),
            [],
        ),
    ],
)
def test_two_classes_form_missing_batches_with_be_last(
    running: tuple[LiveBatch, ...], forms: list[BatchSelection]
) -> None:
    assert list(by_class(Classes(2, 2, running))) == forms


@pytest.mark.parametrize(
    ("running", "left_s", "forms"),
    [
        ((live(Priority.BE),), 0.05, [LS_PROMPTS]),
        ((live(Priority.BE),), -0.01, [LS_DECODES, LS_PROMPTS]),
        ((), 0.05, [LS_DECODES, LS_PROMPTS, BE_BATCH]),  # the ranks have nothing else to do
        ((live(Priority.LS, Phase.PREFILL),), 0.05, [LS_DECODES, BE_BATCH]),
    ],
)
def test_ls_decodes_coalesce_while_in_time(
    running: tuple[LiveBatch, ...], left_s: float, forms: list[BatchSelection]
) -> None:
    assert list(coalesce_decodes(lambda: left_s, lambda: -1)(Classes(2, 2, running))) == forms


def be_prompts(starts: int) -> BatchSelection:
    return BatchSelection((Priority.BE,), Phase.PREFILL, starts)


LS_DECODE_RUNS = live(Priority.LS, Phase.DECODE)


@pytest.mark.parametrize(
    ("running", "left_s", "places", "forms"),
    [
        ((), 0.05, 5, [ALL_DECODES, LS_PROMPTS, be_prompts(5)]),
        ((), 0.05, 0, [ALL_DECODES, LS_PROMPTS, be_prompts(0)]),
        ((), 0.05, 999, [ALL_DECODES, LS_PROMPTS, be_prompts(BEST_EFFORT_STARTS)]),
        ((live(Priority.BE),), -0.01, 5, [ALL_DECODES, LS_PROMPTS]),
        ((live(Priority.BE),), 0.05, 5, [LS_PROMPTS]),
        ((LS_DECODE_RUNS,), math.inf, 5, [LS_PROMPTS, be_prompts(5)]),  # the rest waits for it
        # nobody of LS decodes: a batch of BE is of both phases
        ((), math.inf, 5, [LS_DECODES, LS_PROMPTS, BE_BATCH]),
        ((live(Priority.LS, Phase.PREFILL),), math.inf, 5, [LS_DECODES, BE_BATCH]),
        # LS would be late, or leaves them no room
        ((LS_DECODE_RUNS,), math.inf, -1, [LS_PROMPTS, BE_BATCH]),
    ],
)
def test_be_decodes_fill_ls_decode_batches(
    running: tuple[LiveBatch, ...], left_s: float, places: int, forms: list[BatchSelection]
) -> None:
    policy = coalesce_decodes(lambda: left_s, lambda: places)
    assert list(policy(Classes(2, 2, running))) == forms


def test_single_class_batch_is_not_filled_up() -> None:
    policy = coalesce_decodes(lambda: 0.05, lambda: 5)
    assert tuple(policy(Classes(2, 0))) == (ALL,)
    assert not tuple(policy(Classes(2, 0, (LS_DECODE_RUNS,))))


def best_effort(ran_s: float, age_s: float, left_s: float) -> LiveBatch:
    return LiveBatch(Priority.BE, 4096, 8, ran_s=ran_s, age_s=age_s, remaining_s=left_s)


@pytest.mark.parametrize(
    ("left_s", "copy_s", "ran_s", "overtakes"),
    [
        (1.0, 0.05, 0.5, True),  # two copies lost, and eight of the pass itself: half a second
        (0.4, 0.05, 0.5, False),
        (1.0, 0.11, 0.5, False),
        (1.0, 0.05, 0.09, False),  # others had nine tenths of its time
        (0.001, 0.0, 0.5, True),
    ],
)
def test_ls_preempts_a_copied_pass_only_if_profitable(
    left_s: float, copy_s: float, ran_s: float, overtakes: bool
) -> None:
    policy = preempt_if_profitable(lambda: copy_s, 0.1)
    running = best_effort(ran_s, 1.0, left_s)
    forms = [BatchSelection((Priority.LS,))] if overtakes else []
    assert list(policy(Classes(1, 1, (running,)))) == forms
    overtaking = LiveBatch(Priority.LS, 64, 8)
    assert not list(policy(Classes(1, 1, (running, overtaking)))), "nobody overtakes who overtakes"
    assert list(policy(Classes(1, 1))) == [ALL]
