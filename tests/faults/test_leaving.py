"""Draining ranks complete or hand over their requests; every stream has the expected tokens."""

import asyncio
import signal
from pathlib import Path

import pytest

from actors.channels.endpoint import Endpoint
from actors.moe.remote_backend import RemotePending
from actors.ranks.expert_rank import ExpertLoop
from actors.ranks.rank import Rank
from cluster.routing.pipeline_backend import PipelineBackend
from contracts.messages import Submit
from contracts.ranks import DRAINED
from contracts.requests import Sampling
from tests.support.attention_ranks import StreamedRequest, run_client
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.group_harness import ThreadGroup, greedy, group_config, loop_of, rank_of, until
from tests.support.local_group import LocalGroup
from tests.support.tiny_models import Checkpoints, prompts

pytestmark = pytest.mark.usefixtures("ranks_are_forked")
PROMPT = prompts(7, [24])[0]
TOKENS = 40
SAMPLINGS = {
    "greedy": Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True),
}


@pytest.fixture(scope="session")
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_experts=8)


def request(backend: PipelineBackend, sampling: Sampling) -> StreamedRequest:
    return StreamedRequest(backend, Submit(request_id=0, token_ids=PROMPT, sampling=sampling))


def loop_endpoint(rank: Rank) -> Endpoint:
    assert isinstance(rank.loop, ExpertLoop)
    return rank.loop._endpoint


@pytest.mark.parametrize("within_s", [0.0, 60.0])
def test_draining_attention_rank_completes_or_hands_over(folder: Path, within_s: float) -> None:
    """A failed attempt would fail the request, because max_attempts is 1."""

    async def body(backend: PipelineBackend) -> None:
        expected = {kind: await request(backend, one).task for kind, one in SAMPLINGS.items()}
        requests = {kind: request(backend, one) for kind, one in SAMPLINGS.items()}
        more = [request(backend, SAMPLINGS["greedy"]) for _ in range(3)]
        await asyncio.gather(*(each.has(3) for each in (*requests.values(), *more)))
        group.attention[0].drain(within_s)
        later = request(backend, SAMPLINGS["seeded"])
        assert await later.task == expected["seeded"]
        assert {kind: await each.task for kind, each in requests.items()} == expected
        assert [await each.task for each in more] == [expected["greedy"]] * 3

    with ThreadGroup(folder, group_config(2, 1)) as group:
        addresses = {one.ready.name: one.ready.client_address for one in group.attention}
        run_client(addresses, group.token, body, max_attempts=1)
        assert group.attention[0].wait_drained(10.0)
        status = group.attention[0].status()
        assert (status.healthy, status.running, status.waiting) == (True, 0, 0)
        assert status.notes["leaving"] == DRAINED
        blocks = loop_of(group.attention[0]).scheduler.blocks
        blocks.check([])
        group.attention[0].stop()
        until(lambda: set(loop_endpoint(group.experts[0]).peers()) == {"attention-1"})


@pytest.mark.parametrize("doomed", ["attention-0", "expert-0"])
def test_sigterm_loses_no_token_or_attempt(folder: Path, doomed: str) -> None:
    async def body(backend: PipelineBackend) -> None:
        expected = {kind: await request(backend, one).task for kind, one in SAMPLINGS.items()}
        requests = [
            (kind, request(backend, one)) for kind, one in SAMPLINGS.items() for _ in range(3)
        ]
        await asyncio.gather(*(each.has(3) for _, each in requests))
        group.processes[doomed].send_signal(signal.SIGTERM)
        for kind, each in requests:
            assert await each.task == expected[kind]
        assert await request(backend, SAMPLINGS["seeded"]).task == expected["seeded"]

    config = group_config(2, 2, groups={"drain_timeout_s": 0.0})
    with LocalGroup(str(folder), config) as group:
        run_client(group.client_addresses, group.token, body, max_attempts=1)
        assert group.processes[doomed].close() == 0


def test_requests_do_not_wait_for_draining_expert_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []
    with ThreadGroup(folder, group_config(2, 2)) as group:
        with group.client(0) as client, group.client(1) as other:
            running = [each.submit(PROMPT, sampling=greedy(400)) for each in (client, other)]
            client.wait_started(running[0])
            other.wait_started(running[1])
            monkeypatch.setattr(RemotePending, "hold", lambda pending, piece: held.append(piece))
            group.experts[1].drain(60.0)
            assert group.experts[1].wait_drained(30.0)
            group.experts[1].stop()
            for each, number in zip((client, other), running, strict=True):
                assert len(each.generated(number)[0]) == 400
        for rank in group.attention:
            status = rank.status()
            assert "failover active" in status.notes["experts"]
            assert status.sections["placement"]["stand_in"] == 1
    assert not held


def test_only_expert_rank_serves_until_drain_deadline(folder: Path) -> None:
    with ThreadGroup(folder, group_config(1, 1)) as group, group.client(0) as client:
        group.experts[0].drain(0.5)
        request = client.submit(PROMPT, sampling=greedy(20))
        client.wait_started(request)
        assert group.experts[0].wait_drained(10.0)
        group.replace("expert-0")
        assert len(client.generated(request)[0]) == 20


def test_second_sigterm_ends_rank_at_once(folder: Path) -> None:
    async def body(backend: PipelineBackend) -> None:
        requests = [request(backend, greedy(2000)) for _ in range(2)]
        await asyncio.gather(*(each.has(1) for each in requests))
        group.processes["attention-0"].send_signal(signal.SIGTERM)
        while not backend.problems():
            await asyncio.sleep(0.01)
        group.processes["attention-0"].send_signal(signal.SIGTERM)
        await asyncio.to_thread(group.processes["attention-0"].close)

    config = group_config(1, 1, groups={"drain_timeout_s": 3600.0})
    with LocalGroup(str(folder), config) as group:
        run_client(group.client_addresses, group.token, body, max_attempts=1)


def test_draining_prefill_worker_hands_scores_over(folder: Path) -> None:
    with rank_of("prefill", folder) as (worker, client):
        scheduler = loop_of(worker).scheduler
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "next_batch", lambda form: None)
            number = client.submit(PROMPT, candidates=[1, 2])
            until(lambda: worker.status().waiting == 1)
            worker.drain(0.0)
            failed = client.failed(number)
            assert (failed.code, client.state and client.state.leaving) == ("handed_over", True)
            late = client.submit(PROMPT, candidates=[1, 2])
            assert client.failed(late).code == "handed_over"
        assert worker.wait_drained(10.0)
