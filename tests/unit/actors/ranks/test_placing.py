"""What the launcher makes of expert ranks that are lost while it tells them of their experts."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from actors.ranks import placing
from actors.ranks.placing import Working, place_experts
from contracts.config import TandemConfig
from contracts.errors import LaunchError
from contracts.placement import PlacedExperts, WantedPlacement
from contracts.worker import RankReady
from planner.placement.contiguous import contiguous

ROUNDS_UNDER_WAY = 3


class Expert:
    """Has let go of what it was told some rounds later."""

    def __init__(self, name: str) -> None:
        placement = contiguous(4, 2, num_layers=1, moe_layers=[0])
        self.ready = RankReady(name=name, channel_address="", pid=id(self))
        self.said = PlacedExperts(placement=placement, newest=0)
        self.rounds = 0

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self, method)(*arguments))
        return answer

    def connect(self, addresses: dict[str, str]) -> None:
        pass

    def place(self, wanted: WantedPlacement) -> None:
        generation = wanted.placement.generation
        self.said = msgspec.structs.replace(self.said, newest=generation, under_way=generation)

    def placed(self) -> PlacedExperts:
        if self.said.under_way is not None:
            self.rounds += 1
            if self.rounds > ROUNDS_UNDER_WAY:
                self.said = msgspec.structs.replace(self.said, under_way=None)
        return self.said


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


@pytest.mark.parametrize(
    ("at", "reason"), [("place", "its process ended"), ("placed", "it is lost")]
)
def test_a_rank_that_is_lost_before_it_is_told_is_named_once_the_others_have_let_go(
    at: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "LOOK_S", 0.001)
    ranks = [Expert("expert-1")]
    (other,) = ranks
    ranks.append(Lost("expert-0", at, ranks))
    with pytest.raises(LaunchError, match=f"^1 expert ranks: expert-0: {reason}"):
        place_experts(lambda: [Working(e.ready, e) for e in ranks], 1, TandemConfig())
    assert other.said.newest == 1
    assert other.said.under_way is None
    assert other.rounds > ROUNDS_UNDER_WAY
