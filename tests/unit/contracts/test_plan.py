"""Consistency of plan fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.plan import Order, Plan


def test_plan_beyond_the_paper_round_trips_through_json() -> None:
    plan = Plan(
        r1=4, r2=2, ma=2, shared_lag=1,
        micro_batch_samples=(2, 1), sequence_chunks=(0.625, 1.0),
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.label == "asas ma=2+1 r1=4 r2=2 lag=1 chunks=2"


@pytest.mark.parametrize(
    ("fields", "beyond"),
    [
        ({}, False),
        ({"ma": 2, "r1": 3, "r2": 4, "order": Order.AASS}, False),
        ({"shared_lag": 1, "r1": 2}, True),
        ({"r1": 2, "micro_batch_samples": (4, 3)}, True),
        ({"r1": 2, "sequence_chunks": (0.5, 1.0)}, True),
    ],
)
def test_plan_is_beyond_paper(fields: dict[str, Any], beyond: bool) -> None:
    assert Plan(**fields).is_beyond_paper is beyond


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared_lag": -1}, "shared_lag=-1"),
        ({"shared_lag": 2, "r1": 2}, "shared_lag=2 with order asas, r1=2"),
        ({"shared_lag": 1, "order": Order.AASS}, "shared_lag=1 with order aass"),
        ({"shared_lag": 1, "order": Order.PPPIPE}, "order pppipe takes none"),
        ({"micro_batch_samples": (4,), "order": Order.NAIVE}, "order naive takes none"),
        ({"micro_batch_samples": (4, 3)}, "r1=1 with 2 sizes"),
        ({"micro_batch_samples": (4, 0), "r1": 2}, "sizes are at least 1"),
        ({"micro_batch_samples": (4, 3), "r1": 2, "ma": 3}, "ma the largest"),
        ({"sequence_chunks": (0.5, 1.0), "r1": 3}, "r1=3"),
        ({"sequence_chunks": (0.5, 1.0), "r1": 2, "micro_batch_samples": (1, 1)}, "r1=2"),
        ({"sequence_chunks": (0.5, 0.9), "r1": 2}, "sequence_chunks"),
        ({"sequence_chunks": (0.5, 0.5, 1.0), "r1": 3}, "sequence_chunks"),
        ({"sequence_chunks": (0.0, 1.0), "r1": 2}, "sequence_chunks"),
    ],
)
def test_inconsistent_fields_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**fields)
