"""Metrics, reports and log events of moves."""

from __future__ import annotations

import logging

import pytest

from actors.rebalance.expert_generations import TransitionReport
from actors.rebalance.expert_loading import LoadResult
from actors.rebalance.expert_rebalancer import MoveRecorder
from contracts.planner_messages import MoveOutcome, PlacementReport


def test_move_is_counted_and_reported_with_loaded_bytes(caplog: pytest.LogCaptureFixture) -> None:
    outcomes_sent: list[PlacementReport] = []
    outcomes = MoveRecorder("expert-0", outcomes_sent.append)
    result = LoadResult(3, [1], loaded_bytes=5, seconds=0.25)
    outcomes.add_result(result)
    with caplog.at_level(logging.INFO, "tandem.experts"):
        outcomes.record(TransitionReport(3, MoveOutcome.READY), result)
    assert (outcomes.loaded_bytes, outcomes.load_s) == (5, 0.25)
    assert outcomes.counts[MoveOutcome.READY] == 1
    [one] = outcomes_sent
    assert (one.rank, one.generation, one.loaded_bytes, one.seconds) == ("expert-0", 3, 5, 0.25)
    assert "placement_ready" in caplog.text
    assert outcomes.failures == {}


def test_load_result_of_other_generation_is_not_reported() -> None:
    outcomes_sent: list[PlacementReport] = []
    outcomes = MoveRecorder("expert-0", outcomes_sent.append)
    outcomes.record(
        TransitionReport(4, MoveOutcome.FAILED, "too large"), LoadResult(3, [1], loaded_bytes=5)
    )
    assert (outcomes_sent[0].loaded_bytes, outcomes_sent[0].reason) == (0, "too large")


def test_latest_failure_reasons_are_kept() -> None:
    outcomes = MoveRecorder("expert-0", lambda outcome: None)
    for generation in range(20):
        outcomes.record(
            TransitionReport(generation, MoveOutcome.FAILED, f"reason {generation}"), None
        )
    assert outcomes.failures == {n: f"reason {n}" for n in range(12, 20)}
    assert outcomes.counts[MoveOutcome.FAILED] == 20
