"""Ranks that leave hand over what they have, and others that come are found: nobody's request
fails, and none of its attempts is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.routing.admission import Admission
from cluster.routing.finder import Find
from cluster.routing.least_work import LeastWork
from cluster.routing.placer import RoutingConfig
from cluster.routing.rank_client import RankClient
from contracts.errors import RankError
from tests.support.api_harness import ME, QUICK
from tests.support.fake_rank import FakeRank
from tests.unit.cluster.routing.test_placed_again import WANTED, Asked, counted_on, sent

WHOLE = list(range(40, 40 + WANTED))
Directory = dict[str, str]
Body = Callable[[Admission, list[FakeRank], Directory], Coroutine[Any, Any, None]]


def run(body: Body, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, known: int = 2) -> None:
    """ranks: that listen. known: of these at first; what the directory says is the test's."""
    for period in ("FIND_PERIOD_S", "FOLLOW_PERIOD_S"):
        monkeypatch.setattr(f"cluster.routing.finder.{period}", 0.001)

    async def main() -> None:
        fakes = [FakeRank(f"attention-{i}", counted_on) for i in range(ranks)]
        addresses = {fake.name: await fake.listen() for fake in fakes}
        there = dict(list(addresses.items())[:known])

        async def find(_: dict[str, str]) -> dict[str, str]:
            return there

        admission = Admission(placer(there, find))
        admission.start()
        try:
            await admission.wait_ready()
            there["prefill-0"] = "tcp:127.0.0.1:1"  # of the other pipeline
            await body(admission, fakes, there)
        finally:
            await admission.close()
            for fake in fakes:
                await fake.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def placer(there: Directory, find: Find) -> LeastWork:
    def connect(name: str, address: str) -> RankClient:
        return RankClient(name, address, ME, QUICK)

    clients = [connect(*each) for each in there.items()]
    return LeastWork(clients, RoutingConfig(), find=find, connect=connect)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_stream_goes_on_elsewhere_however_many_ranks_hand_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(admission: Admission, ranks: list[FakeRank], _: Directory) -> None:
        for rank in ranks[:-1]:
            rank.hold_after = 1
        asked = Asked(admission, ignore_eos=True)
        for tokens, rank in enumerate(ranks[:-1], 1):
            await asked.has(tokens)
            await sent(rank, 1)
            rank.leave()
        await asked.task
        assert asked.tokens == WHOLE
        (rest,) = await sent(ranks[-1], 1)
        assert rest.generated == 4, "more than the attempts that a request has"

    run(body, monkeypatch, 5, 5)


def test_a_rank_that_leaves_ends_what_it_has_and_gets_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(admission: Admission, ranks: list[FakeRank], _: Directory) -> None:
        ranks[0].hold_after = 1
        begun = Asked(admission, ignore_eos=True)
        await begun.has(1)
        ranks[0].leave(hands_over=False)
        await until(lambda: "attention-0 is leaving" in admission.problems())
        others = [Asked(admission, ignore_eos=True) for _ in range(4)]
        await asyncio.gather(*(each.task for each in others))
        assert ranks[0].submits.qsize() == 1
        assert not begun.task.done()
        ranks[0].leave()
        await begun.task
        assert begun.tokens == WHOLE

    run(body, monkeypatch)


def test_a_rank_that_hands_over_and_stays_is_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(admission: Admission, ranks: list[FakeRank], _: Directory) -> None:
        ranks[0].fail_with = ("attention-0 leaves", "handed_over", 503)
        asked = Asked(admission)
        with pytest.raises(RankError, match="3 attention ranks were lost"):
            await asked.task

    run(body, monkeypatch, 1, 1)


def test_a_rank_that_comes_is_found_and_one_that_goes_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(admission: Admission, ranks: list[FakeRank], there: Directory) -> None:
        assert len(admission.clients) == 1
        there["attention-1"] = await ranks[1].listen()
        await until(lambda: len(admission.clients) == 2 and not admission.problems())
        ranks[0].hold_after = 1
        begun = Asked(admission, ignore_eos=True)
        await begun.has(1)
        await Asked(admission, ignore_eos=True).task
        assert [rank.submits.qsize() for rank in ranks] == [1, 1]
        del there["attention-0"]
        await until(lambda: len(admission.clients) == 1)
        assert not admission.problems(), "one that goes is nobody's problem"
        await Asked(admission, ignore_eos=True).task
        assert ranks[1].submits.qsize() == 2
        ranks[0].leave()
        await begun.task
        assert begun.tokens == WHOLE
        await until(lambda: not ranks[0]._writers)

    run(body, monkeypatch, 2, 1)


def test_a_directory_that_is_empty_takes_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(admission: Admission, ranks: list[FakeRank], there: Directory) -> None:
        there.clear()
        await asyncio.sleep(0.02)
        asked = Asked(admission, ignore_eos=True)
        await asked.task
        assert asked.tokens == WHOLE

    run(body, monkeypatch)
