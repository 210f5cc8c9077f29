"""Choice of the pipeline, and slots left by large requests."""

from __future__ import annotations

import asyncio

import pytest

from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend, Pipelines
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from contracts.messages import Finished, Submit
from contracts.requests import Sampling
from tests.support.api_harness import ME, QUICK
from tests.support.async_tests import run_async
from tests.support.fake_prefill import FakePrefill, routing
from tests.support.fake_rank import FakeRank


def generation(max_tokens: int) -> Submit:
    return Submit(request_id=0, token_ids=[1, 2, 3], sampling=Sampling(max_tokens=max_tokens))


SCORE = Submit(request_id=0, token_ids=[1, 2, 3], sampling=None, candidates=[5])


async def drain(pipelines: Pipelines, submit: Submit) -> Finished:
    events = [event async for batch in pipelines.generate(submit) for event in batch]
    assert isinstance(events[-1], Finished)
    return events[-1]


@run_async
async def test_request_goes_to_its_pipeline() -> None:
    rank, worker = FakeRank("attention-0", lambda _: [1, 2, 3, 4]), FakePrefill(0)
    backend = PipelineBackend(
        LeastWorkPlacer([RankClient(rank.name, await rank.listen(), ME, QUICK)], RoutingConfig())
    )
    async with routing([worker]) as router:
        both = Pipelines(backend, router)
        both.start()
        await both.wait_ready()
        await both.score(SCORE)
        await drain(both, generation(1))
        assert len(worker.taken) == 2
        assert rank.submits.empty()
        await drain(both, generation(3))
        assert len(worker.taken) == 2
        assert rank.submits.qsize() == 1
        worker.drop_connections()
        await worker.close()
        while not both.problems():
            await asyncio.sleep(0.005)
        assert "prefill-0" in both.problems()[0]
    await backend.close()
    await rank.close()


@run_async
async def test_single_pipeline_runs_all_requests() -> None:
    worker = FakePrefill(0)
    async with routing([worker]) as router:
        only = Pipelines(None, router)
        await only.score(SCORE)
        assert (await drain(only, generation(3))).usage.completion_tokens == 3
    rank = FakeRank("attention-0", lambda _: [1, 2, 3, 4])
    client = RankClient(rank.name, await rank.listen(), ME, QUICK)
    backend = PipelineBackend(LeastWorkPlacer([client], RoutingConfig()))
    only = Pipelines(backend, None)
    only.start()
    await only.wait_ready()
    await only.score(SCORE)
    assert (await drain(only, generation(1))).usage.completion_tokens == 1
    await only.close()
    await rank.close()


def test_backend_without_pipeline_is_rejected() -> None:
    with pytest.raises(ValueError, match="neither"):
        Pipelines(None, None)
