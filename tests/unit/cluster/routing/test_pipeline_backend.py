"""Requests to attention ranks over real sockets, without HTTP."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.channels.handshake import Identity
from actors.channels.local_process import own_identity
from benchmarks.support.rank_stream import open_stream
from cluster.routing.least_work_placer import LeastWorkPlacer, PrefixTable
from cluster.routing.pipeline_backend import LoopThrottle, PipelineBackend, Pipelines
from cluster.routing.rank_client import RankClient, RankClientConfig
from cluster.routing.rank_set import RoutingConfig
from contracts.errors import HandshakeError, OverloadError, PeerHungError, RankError
from contracts.messages import Finished, Submit, Tokens
from contracts.requests import Priority, Sampling, chain_hashes
from tests.support.api_harness import ME, QUICK
from tests.support.async_tests import run_async, until
from tests.support.attention_ranks import with_ranks
from tests.support.fake_prefill import FakePrefill, routing
from tests.support.fake_rank import TOKEN, FakeRank
from tests.support.manual_clock import ManualClock

on_ranks = partial(with_ranks, reply=lambda _: [1, 2, 3, 4, 5])


def submit(tokens: int = 40, max_tokens: int = 4, *, first: int = 0) -> Submit:
    ids = list(range(first, first + tokens))
    return Submit(request_id=0, token_ids=ids, sampling=Sampling(max_tokens=max_tokens))


async def tokens_of(backend: PipelineBackend, wanted: Submit) -> list[int]:
    out: list[int] = []
    async for batch in backend.generate(wanted):
        for event in batch:
            if isinstance(event, Tokens):
                out += event.token_ids
            else:
                assert isinstance(event, Finished)
    return out


@on_ranks()
async def test_concurrent_requests_on_one_connection_do_not_mix(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].reply = lambda s: [s.token_ids[0]] * 10
    wanted = [submit(first=i, max_tokens=i % 5 + 1) for i in range(50)]
    results = await asyncio.gather(*(tokens_of(backend, s) for s in wanted))
    assert results == [[i] * (i % 5 + 1) for i in range(50)]
    ids = [ranks[0].submits.get().request_id for _ in range(50)]
    assert len(set(ids)) == 50


@on_ranks(2)
async def test_request_goes_to_rank_with_its_prefix(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].hold_after = 1
    busy = backend.generate(submit(first=0))
    await anext(busy)
    await tokens_of(backend, submit(first=100))
    await busy.aclose()
    await tokens_of(backend, submit(first=100))  # both are idle; rank 1 has the prefix
    assert [rank.submits.qsize() for rank in ranks] == [1, 2]


@on_ranks(2, no_rank_timeout_s=0.2)
async def test_requests_wait_no_rank_timeout_without_healthy_rank(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].healthy = False
    await backend.clients[0].wait_until(lambda client: client.problem is not None)
    for _ in range(3):
        await tokens_of(backend, submit())
    assert [rank.submits.qsize() for rank in ranks] == [0, 3]
    ranks[1].healthy = False
    await backend.clients[1].wait_until(lambda client: client.problem is not None)
    with pytest.raises(RankError, match=r"no attention rank for 0.2 s.*0.*attention-1") as why:
        await tokens_of(backend, submit())
    assert (why.value.code, why.value.status) == ("not_ready", 503)
    task = asyncio.create_task(tokens_of(backend, submit()))
    await until(lambda: backend.waiting()["generation", "ls"] == 1)
    ranks[1].healthy = True
    assert await task == [1, 2, 3, 4]


@on_ranks(2, max_waiting=1)
async def test_full_rank_is_skipped_and_all_full_is_overload(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    for rank in ranks:
        rank.hold_after = 0
    waiting = [asyncio.create_task(tokens_of(backend, submit())) for _ in range(2)]
    await until(lambda: all(rank.submits.qsize() == 1 for rank in ranks))
    with pytest.raises(OverloadError) as caught:
        await tokens_of(backend, submit())
    assert caught.value.retry_after_s > 0
    assert backend.waiting()["generation", "ls"] == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert backend.waiting()["generation", "ls"] == 0


@run_async
async def test_wrong_token_is_rejected_with_handshake_error() -> None:
    fake = FakeRank("attention-0", lambda _: [1])
    stranger = Identity(name="ingress-0", token=b"not the token", epoch=None)
    client = RankClient(fake.name, await fake.listen(), stranger, QUICK)
    client.start()
    await client.wait_until(lambda c: c.last_error is not None)
    assert isinstance(client.last_error, HandshakeError)
    with pytest.raises(HandshakeError):
        await open_stream(client, submit())
    await client.close()
    await fake.close()


@on_ranks()
async def test_close_fails_waiting_requests(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].hold_after = 1
    waiting = asyncio.create_task(tokens_of(backend, submit()))
    await until(lambda: ranks[0].submits.qsize() == 1)
    await backend.close()
    with pytest.raises(RankError, match="shutting down"):
        await waiting


class CountingClock(ManualClock):
    """A clock that counts its reads."""

    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return super().__call__()


@pytest.mark.parametrize("is_known", [True, False])
@run_async
async def test_local_running_rank_has_fourfold_heartbeat_timeout(is_known: bool) -> None:
    fake, clock = FakeRank("attention-0", lambda _: [1]), CountingClock()
    fake.process_identity = own_identity() if is_known else b""
    me = Identity(name="ingress-0", token=TOKEN, epoch=None)
    config = RankClientConfig(heartbeat_timeout_s=1.5, stall_s=1e9, check_every_s=0.001)
    client = RankClient(fake.name, await fake.listen(), me, config, clock)
    client.start()
    await client.wait_until(lambda c: c.problem is None)
    fake.silent, reads = True, clock.reads
    await until(lambda: clock.reads > reads + 20)  # what it has said already has arrived
    clock.advance(1.6)
    if is_known:
        reads = clock.reads
        await until(lambda: clock.reads > reads + 20)
        assert client.problem is None
        clock.advance(4 * 1.5)
    await client.wait_until(lambda c: c.last_error is not None)
    assert isinstance(client.last_error, PeerHungError)
    await client.close()
    await fake.close()


@given(ls=st.integers(0, 99), be=st.integers(0, 99), blocks=st.integers(0, 4))
def test_cost_of_a_rank_is_its_work_less_the_prefix(ls: int, be: int, blocks: int) -> None:
    client = RankClient("attention-0", "", ME, QUICK)
    (rank,) = LeastWorkPlacer([client], RoutingConfig()).ranks
    rank.add_load(Priority.LS, ls, 1)
    rank.add_load(Priority.BE, be, 1)
    hashes = chain_hashes(range(8), 2)
    rank.prefixes.add(hashes[:blocks])
    assert rank.cost(Priority.LS, hashes, 2) == (ls - 2 * blocks, -2 * blocks)
    assert rank.cost(Priority.BE, hashes, 2) == (ls + be - 2 * blocks, -2 * blocks)


@given(
    tokens=st.lists(st.integers(0, 3), max_size=20), other=st.lists(st.integers(0, 3), max_size=20)
)
def test_match_counts_common_leading_blocks(tokens: list[int], other: list[int]) -> None:
    table = PrefixTable(100)
    table.add(chain_hashes(tokens, 2))
    common = 0
    while (common + 1) * 2 <= min(len(tokens), len(other)) and (
        tokens[: (common + 1) * 2] == other[: (common + 1) * 2]
    ):
        common += 1
    assert table.match(chain_hashes(other, 2)) == common


def test_oldest_chain_is_evicted_from_its_end() -> None:
    table = PrefixTable(4)
    old, new = chain_hashes(range(6), 2), chain_hashes(range(10, 14), 2)
    table.add(old)
    table.add(new)
    assert table.match(new) == 2
    assert table.match(old) == 2  # its third block is evicted


@run_async
async def test_starts_are_limited_per_loop_turn_in_order() -> None:
    throttle, turns, completed = LoopThrottle(3), 0, list[tuple[int, int]]()

    async def one(number: int) -> None:
        await throttle.acquire()
        completed.append((number, turns))

    await one(-1)
    assert completed == [(-1, 0)]
    completed.clear()
    tasks = [asyncio.ensure_future(one(number)) for number in range(12)]
    tasks[5].cancel()
    while not all(task.done() for task in tasks):
        turns += 1
        await asyncio.sleep(0)
    assert [number for number, _ in completed] == [n for n in range(12) if n != 5]
    for acquire in range(turns + 1):
        assert sum(when == acquire for _, when in completed) <= 3
    for _ in range(4):
        await asyncio.sleep(0)
    completed.clear()
    await asyncio.gather(*(one(number) for number in range(3)))
    assert len(completed) == 3, "ready for more requests"


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
