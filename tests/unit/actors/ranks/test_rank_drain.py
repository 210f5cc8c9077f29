"""Drain of a serving loop, on a simulated clock."""

from __future__ import annotations

from typing import cast

import pytest

from actors.batching.observer import LoopControl
from actors.ranks.lifecycle import IN_TRANSIT_S, RankDrain
from contracts.ranks import DRAINED


class Loop:
    """has: number of sequences. done: calls received."""

    def __init__(self, has: int) -> None:
        self.has, self.done = has, list[str]()

    @property
    def load(self) -> tuple[int, int]:
        return self.has, 0

    def announce_drain(self) -> None:
        self.done.append("says so")

    def hand_over(self) -> None:
        self.done.append("hands over")
        self.has = 0


class Rig:
    def __init__(self, has: int = 2) -> None:
        self.now_s = 100.0
        self.loop = Loop(has)
        self.rank_drain = RankDrain("attention-0", lambda: self.now_s)
        self.rank_drain.begin(cast(LoopControl, self.loop))

    def at(self, now_s: float) -> bool:
        """Return True if the rank is drained at that time."""
        self.now_s = now_s
        self.rank_drain.stepped()
        return self.rank_drain.drained.is_set()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_serving_rank_announces_nothing(rig: Rig) -> None:
    assert not rig.at(10_000.0)
    assert not rig.loop.done
    assert not rig.rank_drain.notes()


def test_drain_completes_sequences_in_time(rig: Rig) -> None:
    rig.rank_drain.drain(20.0)
    assert not rig.at(119.9)
    assert rig.rank_drain.notes() == {"leaving": "within 0 s"}
    rig.loop.has = 0
    assert rig.at(119.95 + IN_TRANSIT_S + 0.01)
    assert rig.loop.done == ["says so"]
    assert rig.rank_drain.notes() == {"leaving": DRAINED}


def test_drain_hands_over_remaining_and_late_sequences(rig: Rig) -> None:
    rig.rank_drain.drain(0.0)
    assert not rig.at(100.0)
    assert rig.loop.done == ["says so", "hands over"], "in this order"
    rig.loop.has = 1
    assert not rig.at(100.0 + IN_TRANSIT_S / 2)
    assert rig.at(100.0 + IN_TRANSIT_S + 0.01)
    assert rig.loop.done == ["says so", "hands over", "hands over"]


def test_drain_deadline_can_only_shrink(rig: Rig) -> None:
    rig.rank_drain.drain(10.0)
    rig.rank_drain.drain(2.0)
    rig.rank_drain.drain(30.0)
    assert rig.rank_drain.notes() == {"leaving": "within 2 s"}
    rig.at(101.9)
    assert "hands over" not in rig.loop.done
    rig.at(102.0)
    assert "hands over" in rig.loop.done
