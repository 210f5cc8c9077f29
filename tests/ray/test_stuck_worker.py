"""A prefill worker whose loop hangs while its heartbeats, on a thread of their own, could go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
from ray import cloudpickle

import cluster.fleet.nodes
from actors.engine.stub_executor import StubExecutor
from actors.ranks.remote import rank_class
from actors.ranks.serving_loop import ServingLoop
from actors.ranks.shell import WorkerShell
from benchmarks.rank_stream import ask
from cluster.files.model_folder import resolve_model_folder
from cluster.fleet.fleet import Fleet
from cluster.fleet.launch import launch
from cluster.serving.ray_session import ray_session
from cluster.serving.wiring import pipelines, rank_clients
from contracts.loading import load_config
from contracts.messages import Failed, Submit

pytestmark = pytest.mark.ray

DEADLINE_S = 90.0
STUCK_S = 2.0
CONFIG = load_config(
    None,
    [
        *("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=2"),
        *("prefill.engine=stub", f"channel.stuck_s={STUCK_S}"),
    ],
)


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


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_session(CONFIG, {}, show_rank_logs=False), contextlib.ExitStack() as stack:
        monkeypatch.setattr(
            cluster.fleet.nodes, "rank_class", lambda name, _: rank_class(name, HangingShell)
        )
        fleet = launch(CONFIG, str(resolve_model_folder(CONFIG.model.path)))
        stack.callback(fleet.close)
        yield fleet


def job(number: int) -> Submit:
    return Submit(request_id=0, token_ids=[number, 1, 2], sampling=None, candidates=[7])


def test_it_is_replaced_and_what_waited_there_is_answered_elsewhere(
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
        stream = await ask(client, job(0))  # from here on it hangs
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
