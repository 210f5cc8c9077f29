"""Choice of the workers of a batch."""

from __future__ import annotations

import math

import pytest

from planner.schedule.batch_choice import (
    LONGEST_BUSY_S,
    BatchChoice,
    BatchWork,
    BusyWorkers,
    ExchangeScheme,
    finishes_layer,
    moved_rows,
    served_scheme,
)

BATCH, SHORT = (BatchWork(tokens, tokens * 10**6, 8, 2048) for tokens in (1500, 100))


def test_gain_is_that_of_measured_times_of_similar_batches_without_the_first() -> None:
    choice = BatchChoice(2)
    assert choice.alone_s(BATCH, 0.0) == choice.gain_s(BATCH, 0.0, 1.0) == 0.0
    for seconds in (9.0, 0.6):
        choice.alone(BATCH, seconds)
    modelled_s = choice.gain_s(BATCH, 0.0, 1.0)
    assert 0.0 < modelled_s < 0.3
    assert choice.gain_s(BATCH, 0.0, 100.0) < modelled_s  # slow links
    for seconds in (9.0, 0.45):
        choice.shared(BATCH, seconds)
    assert choice.alone_s(BATCH, 0.0) == pytest.approx(0.6)
    assert choice.gain_s(BATCH, 0.0, 1.0) == pytest.approx(0.15)
    choice.alone(SHORT, 0.07)
    choice.shared(SHORT, 0.09)
    assert choice.gain_s(SHORT, 0.0, 1.0) == pytest.approx(-0.02)
    assert choice.gain_s(BATCH, 0.0, 1.0) == pytest.approx(0.15)


def test_modelled_times_divide_computing_and_count_copies_and_links() -> None:
    choice, batch = BatchChoice(2), BatchWork(1000, 10**9, 10, 4096)
    for seconds in (9.0, 2.0):
        choice.alone(batch._replace(tokens=2000, flops=2 * 10**9), seconds)
    assert choice.alone_s(batch, 0.0) == pytest.approx(1.0)
    assert choice.alone_s(batch, 0.2) == pytest.approx(0.1 + 9 * 0.2)
    assert choice.alone_s(batch._replace(flops=0, layers=0), 0.2) == 0.0  # nothing is left
    rows_s = 4 * 1000 * 10 * 4096 / 2 / 1e9
    collectives_s = 4 * 2e-4 * 10
    assert 1.0 - choice.gain_s(batch, 0.0, 1.0) == pytest.approx(0.5 + rows_s + collectives_s)
    assert 1.0 - choice.gain_s(batch, 0.0, 10.0) == pytest.approx(0.5 + 10 * rows_s + collectives_s)


def test_time_of_all_workers_is_tried_again_after_many_refusals() -> None:
    choice = BatchChoice(2)
    for seconds in (9.0, 0.5):
        choice.alone(BATCH, seconds)
        choice.shared(BATCH, 2 * seconds)
    for _ in range(63):
        choice.alone(BATCH, 0.5)
    assert choice.gain_s(BATCH, 0.0, 1.0) < 0.0
    choice.alone(BATCH, 0.5)
    assert choice.gain_s(BATCH, 0.0, 1.0) > 0.0


def test_workers_are_busy_for_the_time_they_announced_last() -> None:
    busy = BusyWorkers()
    assert busy.until_s == 0.0
    busy.note("prefill-1", 2.0, 100.0)
    busy.note("prefill-2", 1.0, 100.5)
    assert busy.until_s == 102.0
    busy.note("prefill-1", 0.0, 101.0)
    assert busy.until_s == 101.5


def test_gain_counts_layers_that_are_computed_again_when_others_leave() -> None:
    choice = BatchChoice(2)
    for seconds in (9.0, 1.6):  # 0.2 s a layer
        choice.alone(BATCH, seconds)
    for seconds in (9.0, 0.8):  # 0.1 s a layer
        choice.shared(BATCH, seconds)
    assert choice.gain_s(BATCH, 0.0, 1.0) == pytest.approx(0.8)
    stays = math.exp(-2.0 * 0.1)
    layers = sum(stays**layer for layer in range(8))
    expected_s = layers * (stays * 0.1 - (1 - stays) * (0.05 + 0.01))
    assert choice.gain_s(BATCH, 0.01, 1.0, 2.0) == pytest.approx(expected_s)
    assert choice.gain_s(BATCH, 0.01, 1.0, 20.0) < 0.0


def test_rate_of_leaving_follows_the_idle_times_of_other_workers() -> None:
    busy, now_s = BusyWorkers(), 100.0
    assert busy.leaves_per_s(now_s) == 0.0
    for _ in range(200):
        busy.note("prefill-1", 0.0, now_s)
        busy.note("prefill-1", 0.0, now_s + 0.1)
        busy.note("prefill-1", 0.3, now_s + 0.25)
        now_s += 0.5
    assert busy.leaves_per_s(now_s) == pytest.approx(4.0, rel=0.2)
    busy.note("prefill-2", 1.0, now_s)
    assert busy.leaves_per_s(now_s) == pytest.approx(8.0, rel=0.2)
    busy.note("prefill-1", 0.0, now_s)
    assert busy.leaves_per_s(now_s + 60.0) < 0.7


@pytest.mark.parametrize("seconds", [1e9, math.inf, math.nan])
def test_announcement_of_any_length_keeps_others_from_sharing_for_a_limited_time(
    seconds: float,
) -> None:
    busy = BusyWorkers()
    busy.note("prefill-1", seconds, 100.0)
    assert busy.until_s == 100.0 + LONGEST_BUSY_S


def test_worker_leaves_within_a_layer_if_that_delays_its_leader_relatively_less() -> None:
    short_s, batch_s, layer_s = 0.12, 1.2, 0.15
    assert not finishes_layer(0.1, short_s, layer_s, batch_s)
    assert finishes_layer(0.01, short_s, layer_s, batch_s)
    assert finishes_layer(0.07, batch_s, layer_s, batch_s)  # as long as the batch itself
    assert not finishes_layer(0.08, batch_s, layer_s, batch_s)
    assert not finishes_layer(0.0, short_s, 0.0, 0.0)  # nothing was measured


def test_rows_are_those_of_measured_copies_and_shuffling_never_beats_data_parallel() -> None:
    for scheme, copies, rows in (
        ("all_reduce", 0.74, 4.48),
        ("reduce_scatter", 0.74, 3.48),
        ("shuffled", 0.545, 3.09),  # and with grouped experts
        ("shuffled", 0.377, 2.754),
    ):
        assert moved_rows(ExchangeScheme(scheme), 2, copies) == pytest.approx(rows)
    for workers in range(1, 9):
        most = moved_rows(ExchangeScheme.DATA_PARALLEL, workers, workers - 1)
        assert most <= moved_rows(ExchangeScheme.SHUFFLED, workers, 0)


def test_served_batches_are_shuffled_between_nodes_only() -> None:
    assert served_scheme((0, 0, 0)) is ExchangeScheme.REDUCE_SCATTER
    assert served_scheme((0, 1, 0)) is ExchangeScheme.SHUFFLED
