"""Expert call models: small calls predict full batches."""

from __future__ import annotations

import random

import pytest

from planner.costs.stages import Linear
from planner.online.stages import ExpertStage, ExpertTimes
from tests.support.model_shapes import QWEN3_235B, shape

MODEL = shape(QWEN3_235B, num_experts=16, num_experts_per_tok=4)
TRUE = ExpertTimes(call_ms=0.5, read_ms=14.0, token_ms=1.3, hit_per_token=0.25)


def taught(rows: tuple[int, ...], slower: float = 1.0, stage: ExpertStage | None = None):  # type: ignore[no-untyped-def]
    stage = stage or ExpertStage(MODEL, None, 64.0)
    source = random.Random(0)
    for tokens in source.sample(rows * 60, len(rows) * 60):
        x = tokens / 4
        stage.add(x, slower * TRUE.at(x) * source.uniform(0.95, 1.05))
    return stage


def test_small_calls_and_a_rare_prompt_predict_full_calls() -> None:
    """A line through them would be half too high."""
    stage = taught((1,) * 20 + (2,) * 6 + (3, 4) * 3 + (40, 70))
    line = stage.around(64.0)
    assert line is not None
    assert line.at(64.0) == pytest.approx(TRUE.at(64.0), rel=0.05)
    assert line.at(16.0) == pytest.approx(TRUE.at(16.0), rel=0.05)


def test_a_line_is_exact_for_a_batch_and_its_quarter() -> None:
    for x in (0.25, 2.0, 50.0):
        line = TRUE.around(x)
        assert line.at(x) == pytest.approx(TRUE.at(x))
        assert line.at(x / 4) == pytest.approx(TRUE.at(x / 4))
        assert line.at(0.0) >= TRUE.at(0.0) - 1e-9


def test_slower_machine_is_followed() -> None:
    stage = taught((1, 4, 16, 64))
    taught((1, 4, 16, 64), 2.0, stage)
    line = stage.around(40.0)
    assert line is not None
    assert line.at(40.0) == pytest.approx(2 * TRUE.at(40.0), rel=0.07)


def test_stage_is_cold_below_three_sizes() -> None:
    stage = ExpertStage(MODEL, None, 64.0)
    for _ in range(40):
        stage.add(1.0, 2.0)
        stage.add(2.0, 3.0)
    assert stage.model is stage.around(1.0) is None
    stage.add(8.0, 9.0)
    assert stage.model is not None


def test_hardware_file_line_is_the_initial_model() -> None:
    prior = Linear(1.0, 2.0)
    stage = ExpertStage(MODEL, prior, 64.0)
    assert stage.model == stage.around(3.0) == prior


def test_top_k_of_all_experts_reads_all() -> None:
    times = ExpertTimes(1.0, 5.0, 1.0, hit_per_token=1.0)
    assert times.at(0.001) == pytest.approx(6.0, rel=0.001)
