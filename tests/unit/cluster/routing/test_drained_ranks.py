"""Ranks that drain and join: no request fails or loses an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import FindRanks, RoutingConfig
from contracts.errors import RankError
from tests.support.api_harness import ME, QUICK
from tests.support.fake_rank import FakeRank
from tests.unit.cluster.routing.test_retries import WANTED, Generation, counted_on, sent

WHOLE = list(range(40, 40 + WANTED))
Directory = dict[str, str]
Body = Callable[[PipelineBackend, list[FakeRank], Directory], Coroutine[Any, Any, None]]


def run(body: Body, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, known: int = 2) -> None:
    """Run `body` with fake ranks, of which the directory lists the first `known`."""
    for period in ("SEARCH_PERIOD_S", "POLL_PERIOD_S"):
        monkeypatch.setattr(f"cluster.routing.rank_set.{period}", 0.001)

    async def main() -> None:
        fakes = [FakeRank(f"attention-{i}", counted_on) for i in range(ranks)]
        addresses = {fake.name: await fake.listen() for fake in fakes}
        directory = dict(list(addresses.items())[:known])

        async def find(_: dict[str, str]) -> dict[str, str]:
            return directory

        backend = PipelineBackend(placer(directory, find))
        backend.start()
        try:
            await backend.wait_ready()
            directory["prefill-0"] = "tcp:127.0.0.1:1"  # of the other pipeline
            await body(backend, fakes, directory)
        finally:
            await backend.close()
            for fake in fakes:
                await fake.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def placer(directory: Directory, find: FindRanks) -> LeastWorkPlacer:
    def connect(name: str, address: str) -> RankClient:
        return RankClient(name, address, ME, QUICK)

    clients = [connect(*each) for each in directory.items()]
    return LeastWorkPlacer(clients, RoutingConfig(), find=find, connect=connect)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_stream_resumes_after_any_number_of_handovers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(backend: PipelineBackend, ranks: list[FakeRank], _: Directory) -> None:
        for rank in ranks[:-1]:
            rank.hold_after = 1
        generation = Generation(backend, ignore_eos=True)
        for tokens, rank in enumerate(ranks[:-1], 1):
            await generation.has(tokens)
            await sent(rank, 1)
            rank.leave()
        await generation.task
        assert generation.tokens == WHOLE
        (rest,) = await sent(ranks[-1], 1)
        assert rest.generated == 4, "more handovers than max_attempts"

    run(body, monkeypatch, 5, 5)


def test_draining_rank_completes_its_requests_and_gets_no_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(backend: PipelineBackend, ranks: list[FakeRank], _: Directory) -> None:
        ranks[0].hold_after = 1
        started = Generation(backend, ignore_eos=True)
        await started.has(1)
        ranks[0].leave(hands_over=False)
        await until(lambda: "attention-0 is leaving" in backend.problems())
        others = [Generation(backend, ignore_eos=True) for _ in range(4)]
        await asyncio.gather(*(each.task for each in others))
        assert ranks[0].submits.qsize() == 1
        assert not started.task.done()
        ranks[0].leave()
        await started.task
        assert started.tokens == WHOLE

    run(body, monkeypatch)


def test_handover_by_rank_that_stays_counts_as_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(backend: PipelineBackend, ranks: list[FakeRank], _: Directory) -> None:
        ranks[0].fail_with = ("attention-0 leaves", "handed_over", 503)
        generation = Generation(backend)
        with pytest.raises(RankError, match="3 attention ranks were lost"):
            await generation.task

    run(body, monkeypatch, 1, 1)


def test_new_rank_is_discovered_and_removed_rank_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(backend: PipelineBackend, ranks: list[FakeRank], directory: Directory) -> None:
        assert len(backend.clients) == 1
        directory["attention-1"] = await ranks[1].listen()
        await until(lambda: len(backend.clients) == 2 and not backend.problems())
        ranks[0].hold_after = 1
        started = Generation(backend, ignore_eos=True)
        await started.has(1)
        await Generation(backend, ignore_eos=True).task
        assert [rank.submits.qsize() for rank in ranks] == [1, 1]
        del directory["attention-0"]
        await until(lambda: len(backend.clients) == 1)
        assert not backend.problems(), "a draining rank is no problem"
        await Generation(backend, ignore_eos=True).task
        assert ranks[1].submits.qsize() == 2
        ranks[0].leave()
        await started.task
        assert started.tokens == WHOLE
        await until(lambda: not ranks[0]._writers)

    run(body, monkeypatch, 2, 1)


def test_empty_directory_removes_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(backend: PipelineBackend, ranks: list[FakeRank], directory: Directory) -> None:
        directory.clear()
        await asyncio.sleep(0.02)
        generation = Generation(backend, ignore_eos=True)
        await generation.task
        assert generation.tokens == WHOLE

    run(body, monkeypatch)
