"""Ranks whose threads block: status is answered, and a hung prefill worker is replaced."""

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
from contracts.config import TandemConfig
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.ranks import RankStatus
from tests.support.stub_rank import StubExecutor

pytestmark = pytest.mark.ray

DEADLINE_S = 90.0
STUCK_S = 2.0
SETTINGS = (
    *("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=2"),
    *("prefill.engine=tests.support.stub_rank:stub_rank", f"channel.step_timeout_s={STUCK_S}"),
)


class WaitingShell(WorkerShell):
    """A shell whose `connect` and `metrics` block."""

    def __init__(self) -> None:
        super().__init__()
        self._released = threading.Event()

    def connect(self, addresses: dict[str, str]) -> None:
        self._released.wait()

    def metrics(self) -> str:
        self._released.wait()
        return ""

    def status(self) -> RankStatus:
        return RankStatus(name="prefill-0", healthy=True)

    def stop(self) -> None:
        self._released.set()


def _hang(sequence: object) -> None:
    threading.Event().wait()


class HangingShell(WorkerShell):
    """A shell whose first prefill-0 hangs in the step of its first request."""

    def start(self) -> None:
        loop, spec = self._made.loop, self._made.spec
        if isinstance(loop, ServingLoop) and (spec.rank, spec.epoch) == (0, 1):
            assert isinstance(loop.executor, StubExecutor)
            loop.executor._answer = _hang  # type: ignore[method-assign]
        super().start()


@pytest.fixture(scope="module")
def config(app_settings: list[str]) -> Iterator[TandemConfig]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = load_config(None, [*SETTINGS, *app_settings])
    with ray_session(config, {}, show_rank_logs=False):
        yield config


@pytest.fixture
def fleet(config: TandemConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(
            cluster.fleet.nodes, "rank_class", lambda name, _: rank_class(name, HangingShell)
        )
        fleet = launch(config, str(resolve_model_folder(config.model.path)))
        stack.callback(fleet.close)
        yield fleet


def job(number: int) -> Submit:
    return Submit(request_id=0, token_ids=[number, 1, 2], sampling=None, candidates=[7])


def test_status_is_answered_while_connect_and_metrics_block(config: TandemConfig) -> None:
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


def test_hung_worker_is_replaced_and_its_requests_are_answered(
    config: TandemConfig, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def find(suspects: dict[str, str]) -> dict[str, str]:
        return fleet.directory.prefill_addresses

    async def body() -> None:
        directory = fleet.directory
        address = directory.prefill_addresses["prefill-0"]
        router = pipelines(config, directory, find)
        router.start()
        await router.wait_ready()
        (client,) = rank_clients({"prefill-0": address}, directory.token)
        client.start()
        await client.wait_until(lambda client: client.problem is None)
        stream = await open_stream(client, job(0))  # it hangs from now on
        scores = [asyncio.create_task(router.score(job(number))) for number in range(1, 60)]
        failed = await anext(stream)
        assert isinstance(failed, Failed)
        assert failed.code == "peer_hung"
        assert "prefill-0 has been stuck in one step" in failed.message
        assert len(await asyncio.gather(*scores)) == 59
        while fleet.directory.ranks == directory.ranks or router.problems():
            await asyncio.sleep(0.05)
        assert fleet.directory.prefill_addresses["prefill-0"] != address
        await asyncio.gather(*(router.score(job(number)) for number in range(60)))
        await client.close()
        await router.close()

    with caplog.at_level(logging.ERROR, "tandem.fleet"):
        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
    (lost,) = [r for r in caplog.records if r.message.startswith("worker_lost")]
    assert "prefill-0 has been stuck" in lost.message
