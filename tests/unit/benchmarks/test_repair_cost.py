"""What is beside what in `benchmarks.repair_cost`: the same answers, with repair and without."""

from __future__ import annotations

import pytest

from actors.moe.remote_backend import RemoteBackend
from actors.rebalance.expert_rebalancer import ExpertRebalancer
from actors.rebalance.placement_client import PlacementClient
from benchmarks import repair_parts, unrepaired_rank
from benchmarks.repair_cost import SIDES, summary_of


def test_parts_are_timed_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDS", "LAYERS_A_ROUND", "LOOKS_A_ROUND"):
        monkeypatch.setattr(repair_parts, name, 2)
    found = repair_parts.parts_us()
    assert len(found) == len(repair_parts.TOKENS) + 1
    assert all(part.keys() == {"with", "without", "added"} for part in found.values())


def test_a_rank_is_switched_there_and_back() -> None:
    parts = (
        (RemoteBackend, "begin"),
        (RemoteBackend, "poll"),
        (PlacementClient, "look"),
        (ExpertRebalancer, "look"),
    )
    before = [getattr(owner, name) for owner, name in parts]
    unrepaired_rank.switch(unrepaired_rank.WITHOUT, None)
    without = [getattr(owner, name) for owner, name in parts]
    unrepaired_rank.switch(unrepaired_rank.WITH, None)
    assert not set(before) & set(without)
    assert [getattr(owner, name) for owner, name in parts] == before


def test_costs_are_ratios_within_a_round() -> None:
    slower = [
        {side: {"seconds": busy * (1.02 if side == "with" else 1.0)} for side in SIDES}
        for busy in (1.0, 3.0, 2.0, 8.0, 5.0, 1.0)
    ]
    summary = summary_of(slower)
    assert summary["cost"]["seconds"]["median"] == pytest.approx(0.02)
    assert summary["control"]["seconds"]["median"] == pytest.approx(1 / 1.02 - 1)
