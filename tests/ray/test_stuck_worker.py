"""A rank's actor whose threads wait for what never comes: a supervisor's question is answered all
the same; and a prefill worker whose loop hangs while its heartbeats, on a thread of their own,
could go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle

import cluster.fleet.nodes
from actors.ranks.remote import RayRank, rank_class
from actors.ranks.serving_loop import ServingLoop
from actors.ranks.shell import WorkerShell
from benchmarks.support.rank_stream import open_stream
from cluster.fleet.fleet import Fleet
from cluster.fleet.launch import launch
from cluster.fleet.model_folder import resolve_model_folder
from cluster.serving.ingress_app import pipelines, rank_clients
from cluster.serving.ray_session import ray_session
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.ranks import RankStatus
from tests.support.ray_support import ray_of_our_own
from tests.support.stub_executor import StubExecutor

pytestmark = pytest.mark.ray

DEADLINE_S = 90.0
STUCK_S = 2.0
CONFIG = load_config(
    None,
    [
        *("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=2"),
        *("prefill.engine=tests.support.stub_rank:stub_rank", f"channel.step_timeout_s={STUCK_S}"),
    ],
)


class WaitingShell(WorkerShell):
    """Its `connect` waits for a peer that never answers; `metrics` until it is asked for spans."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = threading.Event()

    def connect(self, addresses: dict[str, str]) -> None:
        self._asked.wait()

    def metrics(self) -> str:
        self._asked.wait()
        return ""

    def status(self) -> RankStatus:
        return RankStatus(name="prefill-0", healthy=True)

    def stop(self) -> None:
        self._asked.set()


def _hang(sequence: object) -> None:
    threading.Event().wait()


class HangingShell(WorkerShell):
    """The first prefill-0 hangs in the step that would answer its first request."""

    def start(self) -> None:
        loop, spec = self._made.loop, self._made.spec
        if isinstance(loop, ServingLoop) and (spec.rank, spec.epoch) == (0, 1):
            assert isinstance(loop.executor, StubExecutor)
            loop.executor._answer = _hang  # type: ignore[method-assign]
        super().start()


@pytest.fixture(scope="module", autouse=True)
def cluster_of_this_file() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_of_our_own(), ray_session(CONFIG, {}, show_rank_logs=False):
        yield


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(
            cluster.fleet.nodes, "rank_class", lambda name, _: rank_class(name, HangingShell)
        )
        fleet = launch(CONFIG, str(resolve_model_folder(CONFIG.model.path)))
        stack.callback(fleet.close)
        yield fleet


def job(number: int) -> Submit:
    return Submit(request_id=0, token_ids=[number, 1, 2], sampling=None, candidates=[7])


def test_the_status_is_told_while_connect_and_a_scrape_wait() -> None:
    """FINDINGS B2: it waited behind `connect`, and healthy workers were killed for it."""
    actor: Any = rank_class("attention-0", WaitingShell).options(num_cpus=0).remote()
    rank = RayRank("prefill-0", actor)
    connecting = rank.call("connect", {"prefill-1": "tcp:10.0.0.1:1"})
    scraping = rank.call("metrics")
    try:
        for _ in range(3):
            assert rank.call("status").result(DEADLINE_S).healthy
        assert not connecting.done()
        assert not scraping.done()
    finally:
        ray.kill(actor)


def test_a_hung_worker_is_replaced_and_what_waited_there_is_answered_elsewhere(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def find(suspects: dict[str, str]) -> dict[str, str]:
        return fleet.directory.prefill_addresses

    async def body() -> None:
        directory = fleet.directory
        address = directory.prefill_addresses["prefill-0"]
        router = pipelines(CONFIG, directory, find)
        router.start()
        await router.wait_ready()
        (client,) = rank_clients({"prefill-0": address}, directory.token)
        client.start()
        await client.wait_until(lambda client: client.problem is None)
        stream = await open_stream(client, job(0))  # from here on it hangs
        scores = [asyncio.create_task(router.score(job(number))) for number in range(1, 60)]
        failed = await anext(stream)
        assert isinstance(failed, Failed)
        assert failed.code == "peer_hung"
        assert "prefill-0 has been stuck in one step" in failed.message
        assert len(await asyncio.gather(*scores)) == 59
        while fleet.directory.epoch == directory.epoch or router.problems():
            await asyncio.sleep(0.05)
        assert fleet.directory.prefill_addresses["prefill-0"] != address
        await asyncio.gather(*(router.score(job(number)) for number in range(60)))
        await client.close()
        await router.close()

    with caplog.at_level(logging.ERROR, "tandem.fleet"):
        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
    (lost,) = [r for r in caplog.records if r.message.startswith("worker_lost")]
    assert "prefill-0 has been stuck" in lost.message
