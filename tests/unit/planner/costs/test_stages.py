"""Validation of planning problems."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from planner.costs.stages import Linear, PlanSpec, StageModels

LINEAR = {"alpha_ms": 0.1, "beta_ms": 0.2}


def document(**changes: Any) -> dict[str, Any]:
    stages = dict.fromkeys(("attention", "shared", "expert", "a2e", "e2a"), LINEAR)
    return {
        "stages": stages,
        "tokens_per_expert_per_sample": 32.0,
        "num_layers": 4,
        "max_samples": 8,
        "max_r2": 16,
        "has_shared": True,
    } | changes


def decode(value: dict[str, Any]) -> PlanSpec:
    return msgspec.json.decode(json.dumps(value), type=PlanSpec)


def test_spec_round_trips_through_json() -> None:
    spec = decode(document())
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PlanSpec) == spec


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e10])
@pytest.mark.parametrize("field", ["alpha_ms", "beta_ms"])
def test_invalid_time_is_rejected_by_field_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        Linear(**(LINEAR | {field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: give a whole number from 1"),
        ({"max_samples": -3}, "max_samples=-3"),
        ({"max_samples": 10**9}, "max_samples=1000000000"),
        ({"max_r2": 0}, "max_r2=0"),
        ({"tokens_per_expert_per_sample": 0.0}, "tokens_per_expert_per_sample=0"),
        ({"tokens_per_expert_per_sample": -1.0}, "tokens_per_expert_per_sample=-1"),
        ({"tokens_per_expert_per_sample": 0.01}, "raise max_samples to 100"),
        ({"attention_quadratic_fraction": 1.5}, "attention_quadratic_fraction=1.5"),
        ({"attention_chunk_ms": -1.0}, "attention_chunk_ms=-1"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"max_samples": None}, "max_samples"),
        ({"max_sampels": 3}, "max_sampels"),
    ],
)
def test_invalid_spec_is_rejected_by_field_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        decode(document(**changes))


def test_spec_with_shared_experts_requires_their_model() -> None:
    stages = dict.fromkeys(("attention", "expert", "a2e", "e2a"), LINEAR)
    with pytest.raises(msgspec.ValidationError, match=r"stages\.shared is missing"):
        decode(document(stages=stages))


@pytest.mark.parametrize("name", ["attention", "expert"])
def test_free_compute_stage_is_rejected(name: str) -> None:
    stages = {key: Linear(0.1, 0.1) for key in ("attention", "expert", "a2e", "e2a")}
    with pytest.raises(ValueError, match=f"{name}: alpha_ms=0 and beta_ms=0"):
        StageModels(**(stages | {name: Linear(0.0, 0.0)}))
