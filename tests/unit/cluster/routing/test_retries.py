"""Generations whose rank is lost continue on another rank, invisibly to the client."""

import asyncio
from functools import partial
from typing import Any

import pytest

from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from contracts.errors import RankError
from contracts.messages import Submit
from contracts.requests import Sampling
from tests.support.api_harness import ME, QUICK
from tests.support.async_tests import run_async, until
from tests.support.attention_ranks import (
    Directory,
    StreamedRequest,
    counted_on,
    started,
    with_ranks,
)
from tests.support.fake_rank import CACHED_TOKENS, FakeRank

PROMPT = list(range(40))
WANTED = 6


class Generation(StreamedRequest):
    """A generation of WANTED tokens, or as requested."""

    def __init__(self, backend: PipelineBackend, **sampling: Any) -> None:
        wanted = Sampling(**{"max_tokens": WANTED, "temperature": 0.0, **sampling})
        submit = Submit(request_id=0, token_ids=PROMPT, sampling=wanted, eos_token_ids=[43])
        super().__init__(backend, submit)


async def sent(rank: FakeRank, count: int) -> list[Submit]:
    while rank.submits.qsize() < count:
        await asyncio.sleep(0)
    return [rank.submits.get() for _ in range(count)]


@with_ranks(2)
async def test_request_without_tokens_is_retried_unchanged(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].hold_after = 0
    generation = [Generation(backend, seed=7, frequency_penalty=1.0) for _ in range(2)]
    await sent(ranks[0], 1)
    ranks[0].drop_connections()
    await asyncio.gather(*(each.task for each in generation))
    (_, second) = await sent(ranks[1], 2)
    assert (second.token_ids, second.sampling and second.sampling.seed) == (PROMPT, 7)
    assert not backend.waiting()["generation", "ls"]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"choices": [list(range(40, 46)), [40, 42]], "min_tokens": 0},
    ],
)
@with_ranks(2)
async def test_stream_resumes_with_prompt_and_tokens(
    backend: PipelineBackend, ranks: list[FakeRank], sampling: dict[str, Any]
) -> None:
    ranks[0].hold_after = 2
    generation = Generation(backend, **{"min_tokens": 5, "ignore_eos": True, **sampling})
    await generation.has(2)
    ranks[0].drop_connections()
    await generation.task
    assert generation.tokens == list(range(40, 40 + WANTED))
    (rest,) = await sent(ranks[1], 1)
    assert (rest.token_ids, rest.generated) == ([*PROMPT, 40, 41], 2)
    assert rest.sampling == generation.submit.sampling, "as requested"
    assert generation.cached == [CACHED_TOKENS], "prompt tokens count once"
    assert generation.finished is not None
    usage = generation.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), WANTED)
    assert usage.cached_tokens == CACHED_TOKENS


@pytest.mark.parametrize(
    ("held", "sampling", "reason"),
    [
        (4, {}, "stop"),
        (WANTED, {"ignore_eos": True}, "length"),
        (2, {"choices": [[40, 41], [40, 42, 43]]}, "stop"),
        (2, {"stop_token_ids": [41]}, "stop"),
    ],
)
@with_ranks(2)
async def test_complete_stream_of_lost_rank_ends_normally(
    backend: PipelineBackend,
    ranks: list[FakeRank],
    held: int,
    sampling: dict[str, Any],
    reason: str,
) -> None:
    """It ends with eos token 43, max_tokens, or a whole choice."""
    ranks[0].hold_after = held
    generation = Generation(backend, **sampling)
    await generation.has(held)
    ranks[0].drop_connections()
    await generation.task
    assert generation.tokens == list(range(40, 40 + held))
    assert generation.finished is not None
    assert generation.finished.reason == reason
    usage = generation.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), held)
    assert usage.cached_tokens == CACHED_TOKENS
    assert ranks[1].submits.empty()


@with_ranks(2)
async def test_request_fails_after_three_lost_ranks(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    for rank in ranks:
        rank.hold_after, rank.on_submit = 1, rank.drop_connections
    generation = Generation(backend)
    with pytest.raises(RankError, match=r"3 attention ranks .* last: attention-") as caught:
        await generation.task
    assert caught.value.code == "peer_dead"
    assert sum(rank.submits.qsize() for rank in ranks) == 3
    assert not backend.waiting()["generation", "ls"]


@with_ranks(2, waiting=2)
async def test_loss_while_waiting_for_expert_ranks_does_not_count(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ends = [None] * 5

    def lost(rank: FakeRank) -> None:
        ends.pop()
        for each in ranks:
            each.hold_after = each.hold_after if ends else None
            each.on_submit = each.on_submit if ends else None
        rank.drop_connections()

    for rank in ranks:
        rank.hold_after, rank.on_submit = 1, partial(lost, rank)
    generation = Generation(backend, min_tokens=WANTED, ignore_eos=True)
    await generation.task
    assert generation.tokens == list(range(40, 40 + WANTED))
    assert not ends


@run_async
async def test_stream_waits_for_replacement_rank() -> None:
    """The replacement is found by its name in the directory."""
    lost, better = (FakeRank("attention-0", counted_on) for _ in range(2))
    directory: dict[str, str] = {}

    async def find(_: dict[str, str]) -> dict[str, str]:
        return directory

    clients = [RankClient(lost.name, await lost.listen(), ME, QUICK)]
    async with started(LeastWorkPlacer(clients, RoutingConfig(), find=find)) as backend:
        lost.hold_after = 2
        before = Generation(backend, ignore_eos=True)
        await before.has(2)
        await lost.close()
        new = Generation(backend, ignore_eos=True)
        while backend.waiting()["generation", "ls"] < 1:
            await asyncio.sleep(0)
        directory["attention-0"] = await better.listen()
        await asyncio.gather(before.task, new.task)
        assert before.tokens == new.tokens == list(range(40, 40 + WANTED))
    await better.close()


@with_ranks(2, max_waiting=2)
async def test_requests_beyond_max_waiting_are_sent_as_rank_answers(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    """All requests of two ranks move to the remaining one."""
    ranks[0].hold_after = ranks[1].hold_after = 1
    started = []
    for _ in range(6):
        started.append(Generation(backend, ignore_eos=True))
        await started[-1].has(1)
    (full, lost) = sorted(ranks, key=lambda rank: rank.submits.qsize())
    full.hold_after = 0
    had = full.submits.qsize()
    await lost.close()
    await sent(full, had + 2)
    await asyncio.sleep(0)
    assert full.submits.empty(), "max_waiting is 2"
    full.hold_after = None
    full.drop_connections()
    await asyncio.gather(*(each.task for each in started))
    assert all(each.tokens == list(range(40, 40 + WANTED)) for each in started)


WHOLE = list(range(40, 40 + WANTED))


@with_ranks(5, known=5)
async def test_stream_resumes_after_any_number_of_handovers(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
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


@with_ranks(2, known=2)
async def test_draining_rank_completes_its_requests_and_gets_no_new_ones(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
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


@with_ranks(1, known=1)
async def test_handover_by_rank_that_stays_counts_as_failure(
    backend: PipelineBackend, ranks: list[FakeRank]
) -> None:
    ranks[0].fail_with = ("attention-0 leaves", "handed_over", 503)
    generation = Generation(backend)
    with pytest.raises(RankError, match="3 attention ranks were lost"):
        await generation.task


@with_ranks(2, known=1)
async def test_new_rank_is_discovered_and_removed_rank_is_forgotten(
    backend: PipelineBackend, ranks: list[FakeRank], directory: Directory
) -> None:
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


@with_ranks(2, known=2)
async def test_empty_directory_removes_no_rank(
    backend: PipelineBackend, ranks: list[FakeRank], directory: Directory
) -> None:
    directory.clear()
    await asyncio.sleep(0.02)
    generation = Generation(backend, ignore_eos=True)
    await generation.task
    assert generation.tokens == WHOLE
