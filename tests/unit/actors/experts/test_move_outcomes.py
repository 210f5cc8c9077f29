"""What the planner, the log and an operator hear of an expert rank's moves."""

from __future__ import annotations

import logging

import pytest

from actors.experts.brought import Brought
from actors.experts.generations import Report
from actors.experts.move_outcomes import MoveOutcomes
from contracts.planning import Outcome, PlacementOutcome


def test_a_move_is_counted_and_told_with_what_it_brought(caplog: pytest.LogCaptureFixture) -> None:
    told: list[PlacementOutcome] = []
    outcomes = MoveOutcomes("expert-0", told.append)
    brought = Brought(3, [1], loaded_bytes=5, seconds=0.25)
    outcomes.brought(brought)
    with caplog.at_level(logging.INFO, "tandem.experts"):
        outcomes.ended(Report(3, Outcome.READY), brought)
    assert (outcomes.loaded_bytes, outcomes.load_s) == (5, 0.25)
    assert outcomes.counts[Outcome.READY] == 1
    [one] = told
    assert (one.rank, one.generation, one.loaded_bytes, one.seconds) == ("expert-0", 3, 5, 0.25)
    assert "placement_ready" in caplog.text
    assert outcomes.failures == {}


def test_what_another_generation_brought_is_not_told_of_this_one() -> None:
    told: list[PlacementOutcome] = []
    outcomes = MoveOutcomes("expert-0", told.append)
    outcomes.ended(Report(4, Outcome.FAILED, "too large"), Brought(3, [1], loaded_bytes=5))
    assert (told[0].loaded_bytes, told[0].reason) == (0, "too large")


def test_why_the_latest_eight_moves_failed_is_remembered() -> None:
    outcomes = MoveOutcomes("expert-0", lambda outcome: None)
    for generation in range(20):
        outcomes.ended(Report(generation, Outcome.FAILED, f"reason {generation}"), None)
    assert outcomes.failures == {n: f"reason {n}" for n in range(12, 20)}
    assert outcomes.counts[Outcome.FAILED] == 20
