"""When a rank that is to go has left: by a clock of the test's own."""

from __future__ import annotations

from typing import cast

import pytest

from actors.batching.observer import Serving
from actors.ranks.leaving import ON_ITS_WAY_S, Leaving
from contracts.worker import LEFT


class Loop:
    """has: sequences. done: what it was told to do."""

    def __init__(self, has: int) -> None:
        self.has, self.done = has, list[str]()

    @property
    def load(self) -> tuple[int, int]:
        return self.has, 0

    def say_leaving(self) -> None:
        self.done.append("says so")

    def hand_over(self) -> None:
        self.done.append("hands over")
        self.has = 0


class Rig:
    def __init__(self, has: int = 2) -> None:
        self.now_s = 100.0
        self.loop = Loop(has)
        self.leaving = Leaving("attention-0", lambda: self.now_s)
        self.leaving.begin(cast(Serving, self.loop))

    def at(self, now_s: float) -> bool:
        """Whether it has left then."""
        self.now_s = now_s
        self.leaving.stepped()
        return self.leaving.left.is_set()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_that_stays_says_nothing(rig: Rig) -> None:
    assert not rig.at(10_000.0)
    assert not rig.loop.done
    assert not rig.leaving.notes()


def test_it_ends_what_it_has_where_there_is_time(rig: Rig) -> None:
    rig.leaving.leave(20.0)
    assert not rig.at(119.9)
    assert rig.leaving.notes() == {"leaving": "within 0 s"}
    rig.loop.has = 0
    assert rig.at(119.95 + ON_ITS_WAY_S + 0.01)
    assert rig.loop.done == ["says so"]
    assert rig.leaving.notes() == {"leaving": LEFT}


def test_it_hands_over_what_is_left_then_and_what_was_on_its_way(rig: Rig) -> None:
    rig.leaving.leave(0.0)
    assert not rig.at(100.0)
    assert rig.loop.done == ["says so", "hands over"], "in this order"
    rig.loop.has = 1
    assert not rig.at(100.0 + ON_ITS_WAY_S / 2)
    assert rig.at(100.0 + ON_ITS_WAY_S + 0.01)
    assert rig.loop.done == ["says so", "hands over", "hands over"]


def test_less_time_counts_and_more_does_not(rig: Rig) -> None:
    rig.leaving.leave(10.0)
    rig.leaving.leave(2.0)
    rig.leaving.leave(30.0)
    assert rig.leaving.notes() == {"leaving": "within 2 s"}
    rig.at(101.9)
    assert "hands over" not in rig.loop.done
    rig.at(102.0)
    assert "hands over" in rig.loop.done
