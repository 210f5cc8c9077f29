"""Loss of expert ranks during a resize."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from actors.ranks import expert_resize
from actors.ranks.expert_resize import RunningRank, place_experts
from contracts.config import TandemConfig
from contracts.errors import LaunchError
from contracts.placement import PlacementState, PlacementUpdate
from contracts.ranks import RankReady
from planner.placement.slots import contiguous

ROUNDS_UNDER_WAY = 3


class Expert:
    """Accepts a placement after a poll and aborts it some polls later."""

    def __init__(self, name: str) -> None:
        placement = contiguous(4, 2, num_layers=1, moe_layers=[0])
        self.ready = RankReady(name=name, channel_address="", pid=id(self))
        self.report = PlacementState(placement=placement, newest=0)
        self.rounds = 0
        self.received: list[int] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self, method)(*arguments))
        return answer

    def connect(self, addresses: dict[str, str]) -> None:
        pass

    def place(self, wanted: PlacementUpdate) -> None:
        self.received.append(wanted.placement.generation)

    def placed(self) -> PlacementState:
        report = self.report
        if self.received:
            new = self.received.pop()
            self.report = msgspec.structs.replace(report, newest=new, under_way=new)
            return report
        if self.report.under_way is not None:
            self.rounds += 1
            if self.rounds > ROUNDS_UNDER_WAY:
                self.report = msgspec.structs.replace(self.report, under_way=None)
        return self.report


class Lost(Expert):
    """at: the call in which it is lost."""

    def __init__(self, name: str, at: str, ranks: list[Expert]) -> None:
        super().__init__(name)
        self._at, self._ranks = at, ranks

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method != self._at:
            return super().call(method, *arguments)
        self._ranks.remove(self)
        if method == "placed":  # its last word
            return super().call(method, *arguments)
        answer: Future[Any] = Future()
        answer.set_exception(LaunchError(f"{self.ready.name}: its process ended"))
        return answer


class Silent(Expert):
    """Accepts a placement without an answer."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer = super().call(method, *arguments)
        return Future() if method == "place" else answer


@pytest.mark.parametrize(
    ("at", "reason"), [("place", "its process ended"), ("placed", "it is lost")]
)
def test_rank_lost_before_placement_is_named_after_abort(
    at: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_resize, "POLL_S", 0.001)
    ranks = [Expert("expert-1")]
    (other,) = ranks
    ranks.append(Lost("expert-0", at, ranks))
    with pytest.raises(LaunchError, match=f"^1 expert ranks: expert-0: {reason}"):
        place_experts(lambda: [RunningRank(e.ready, e) for e in ranks], 1, TandemConfig())
    assert other.report.newest == 1
    assert other.report.under_way is None
    assert other.rounds > ROUNDS_UNDER_WAY


def test_rank_that_does_not_acknowledge_is_named_in_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_resize, "POLL_S", 0.001)
    monkeypatch.setattr(expert_resize, "ANSWER_S", 0.05)
    ranks = [Silent("expert-0"), Expert("expert-1")]
    with pytest.raises(LaunchError, match=r"^1 expert ranks: expert-0 did not receive its experts"):
        place_experts(lambda: [RunningRank(e.ready, e) for e in ranks], 1, TandemConfig())
    assert all(e.report.newest == 1 and e.rounds > ROUNDS_UNDER_WAY for e in ranks)
