"""Expert ranks that attention ranks have lost, and that are there: who is replaced, who is only
introduced again."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from actors.ranks.remote import RayRank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from cluster.fleet.member import Member, RankBundle
from cluster.fleet.nodes import RankPlacement
from cluster.fleet.rank_group import RankGroup
from cluster.fleet.repair import MAJORITY_TIMEOUT_S, TIE_TIMEOUT_S
from contracts.loading import load_config
from contracts.ranks import RankReady, RankStatus


class FakeRank(RayRank):
    """Says that it is well, and whom it has lost. told: calls, by name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self)
        self.lost: dict[str, float] = {}
        self.calls: list[str] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append(method)
        answer: Future[Any] = Future()
        sections = {"lost": dict(self.lost)} if self.lost else {}
        answer.set_result(RankStatus(name=self.name, healthy=True, sections=sections))
        return answer


class Rig:
    """So many attention ranks, and two expert ranks."""

    def __init__(self, attention: int) -> None:
        seats = [Seat("cpu", "127.0.0.1", 1)]
        group_spec = GroupSpec(load_config(None, []), "", b"", 1, "shm")
        specs = make_specs(group_spec, seats * attention, seats * 2)
        self.ranks = {spec.name: FakeRank(spec.name) for spec in specs}
        placed: Any = RankPlacement([], None, "cpu", [])
        self.group = RankGroup(
            [
                Member(
                    spec,
                    RankBundle(placed, place),
                    self.ranks[spec.name],
                    RankReady(name=spec.name, pid=place, channel_address=f"tcp:here:{place}"),
                )
                for place, spec in enumerate(specs)
            ],
            group_spec,
        )
        self.now_s = 100.0
        self.problems()

    def problems(self, after_s: float = 0.0) -> set[str]:
        """Who must be replaced then, by what all say."""
        self.now_s += after_s
        for _ in range(3):  # asked, answered, read
            health = self.group.health(self.now_s, 0.0)
        return set(health.problems)


def test_half_cut_link_replaces_no_rank_before_timeout() -> None:
    """Each of two attention ranks had lost the other side's expert rank, and both were killed: the
    half that could serve had none then."""
    rig = Rig(attention=2)
    rig.ranks["attention-0"].lost = {"expert-1": 1}
    rig.ranks["attention-1"].lost = {"expert-0": 1}
    assert not rig.problems(0.25)
    assert not rig.problems(TIE_TIMEOUT_S - 0.1)
    assert "connect" in rig.ranks["attention-0"].calls, "they are introduced again meanwhile"
    assert rig.problems(0.2) == {"expert-0", "expert-1"}


def test_a_link_that_is_back_begins_anew() -> None:
    rig = Rig(attention=2)
    rig.ranks["attention-0"].lost = {"expert-1": 1}
    assert not rig.problems(TIE_TIMEOUT_S - 1)
    rig.ranks["attention-0"].lost = {}
    assert not rig.problems(TIE_TIMEOUT_S)
    rig.ranks["attention-0"].lost = {"expert-1": 1}
    assert not rig.problems(TIE_TIMEOUT_S - 1)


def test_rank_lost_by_majority_is_replaced_unless_it_returns() -> None:
    """One that was stopped for a moment has lost its links, and is well."""
    for attention in (1, 2, 3):
        rig = Rig(attention)
        for number in range(attention // 2 + 1):
            rig.ranks[f"attention-{number}"].lost = {"expert-1": 1}
        assert not rig.problems(0.25)
        assert "connect" in rig.ranks["attention-0"].calls, "it is introduced again first"
        assert not rig.problems(MAJORITY_TIMEOUT_S - 0.1)
        assert rig.problems(0.2) == {"expert-1"}


def test_an_earlier_one_of_the_name_is_no_reason() -> None:
    rig = Rig(attention=1)
    rig.ranks["attention-0"].lost = {"expert-1": 0}
    assert not rig.problems(2 * TIE_TIMEOUT_S)
