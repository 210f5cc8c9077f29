"""Costs of a micro-batch beside its attention: logits and packets."""

from __future__ import annotations

import pytest

from contracts.planner_messages import MicroBatchReport
from planner.online.stages import MicroBatchStage

LAYERS = 4


def nothing(start: int, stop: int) -> float:
    return 0.0


def taught() -> MicroBatchStage:
    """Return a stage with 4 ms + 0.4 per sequence to finish, 0.5 ms + 0.01 per token to send."""
    stage = MicroBatchStage(LAYERS)
    for _ in range(60):
        for rows in (1, 4, 16, 32):
            batch = [(50, 51)] * rows
            finish_ms, send_ms = 4.0 + 0.4 * rows, 0.5 + 0.01 * rows
            stage.add(MicroBatchReport(batch, 9.0, 0.0, finish_ms, send_ms))
    return stage


def test_finish_cost_is_divided_over_layers() -> None:
    stage = taught()
    assert stage.launch_ms(0.0) == pytest.approx(1.0, rel=0.01)
    assert stage.chunk_time(nothing, 0.0)(50, 51) == pytest.approx(0.1, rel=0.01)


def test_further_expert_rank_costs_a_packet_each_way() -> None:
    stage = taught()
    twice = stage.launch_ms(1.0) - stage.launch_ms(0.0)
    assert twice == pytest.approx(1.0, rel=0.01)
    tokens = stage.chunk_time(nothing, 1.0)(0, 100) - stage.chunk_time(nothing, 0.0)(0, 100)
    assert tokens == pytest.approx(2.0, rel=0.01)
    assert stage.launch_ms(-0.5) == stage.launch_ms(0.0)  # of fewer ranks nothing is known


def test_unreported_overhead_costs_zero() -> None:
    stage = MicroBatchStage(LAYERS)
    for _ in range(60):
        stage.add(MicroBatchReport([(0, 10)], 9.0))
    assert stage.launch_ms(1.0) == stage.chunk_time(nothing, 1.0)(0, 10) == 0.0
