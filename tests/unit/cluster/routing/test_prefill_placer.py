"""The prefill placer over real sockets: no request is lost or answered twice."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from contracts.errors import OverloadError, RankError
from contracts.messages import Failed, Scored, Submit
from contracts.requests import Sampling
from tests.support.async_tests import run_async, until
from tests.support.fake_prefill import BLOCK, FakePrefill, PrefillPipeline, routing


def job(first: int, tokens: int = 2 * BLOCK, **fields: Any) -> Submit:
    ids = list(range(first, first + tokens))
    return Submit(request_id=0, token_ids=ids, sampling=None, candidates=[first % 7], **fields)


def scores(router: PrefillPipeline, count: int, **fields: Any) -> list[asyncio.Task[Scored]]:
    return [asyncio.create_task(router.score(job(n * 100, **fields))) for n in range(count)]


def resume(*workers: FakePrefill) -> None:
    for worker in workers:
        worker.hold = False
        worker.release()


def lister(directory: dict[str, str]) -> Any:
    async def find(suspects: dict[str, str]) -> dict[str, str]:
        assert not suspects
        return dict(directory)

    return find


@run_async
async def test_requests_go_to_the_worker_with_their_experts_unless_it_is_busier() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]

    async with routing(workers, locality=lambda ids, start: [0.0, ids[start] / 400]) as router:
        for worker in workers:
            worker.hold = True
        tasks: list[asyncio.Task[Scored]] = []
        for expected in ((0, 1), (0, 2), (0, 3), (1, 3)):
            tasks.append(asyncio.create_task(router.score(job(1000 + len(tasks)))))
            await until(lambda: sum(len(worker.held) for worker in workers) == len(tasks))
            assert tuple(len(worker.held) for worker in workers) == expected
        resume(*workers)
        await asyncio.gather(*tasks)


@run_async
async def test_requests_go_to_worker_with_prefix_and_load_ends_at_zero() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]
    async with routing(workers) as router:
        for worker in workers:
            worker.hold = True
        shared = list(range(3 * BLOCK))
        prompts = [[*shared, 500 + n] for n in range(6)]
        tasks = [
            asyncio.create_task(
                router.score(Submit(request_id=0, token_ids=p, sampling=None, candidates=[1]))
            )
            for p in prompts
        ]
        await until(lambda: sum(len(w.held) for w in workers) == 6)
        assert sorted(len(w.held) for w in workers) == [0, 6]
        for worker in workers:
            worker.release()
        answers = await asyncio.gather(*tasks)
        await until(lambda: router.load(0) == router.load(1) == 0)
    assert len({tuple(a.candidate_logits or ()) for a in answers}) == 1
    assert not router.waiting()[("prefill", "ls")]


@run_async
async def test_requests_of_dead_worker_move_to_another() -> None:
    dead, alive = FakePrefill(0), FakePrefill(1)
    dead.hold = True
    async with routing([dead, alive]) as router:
        tasks = scores(router, 20)
        await until(lambda: len(dead.held) >= 5)
        await dead.close()
        answers = await asyncio.gather(*tasks)
        assert [a.candidate_logits for a in answers] == [
            (await router.score(job(n * 100))).candidate_logits for n in range(20)
        ]
        assert "prefill-0" in router.problems()[0]


@pytest.mark.parametrize("fault", ["silent", "stuck"])
@run_async
async def test_requests_of_hung_worker_move_and_its_late_answers_are_ignored(fault: str) -> None:
    hung, alive = FakePrefill(0), FakePrefill(1)
    hung.hold = True
    async with routing([hung, alive]) as router:
        tasks = scores(router, 8)
        await until(lambda: hung.held)
        setattr(hung, fault, True)
        await asyncio.gather(*tasks)
        assert "prefill-0" in router.problems()[0]
        if fault == "stuck":
            await until(lambda: not hung.held)  # cancelled there
        setattr(hung, fault, False)
        resume(hung)  # to closed connections
        await until(lambda: not router.problems())
        await asyncio.gather(*scores(router, 8))
        await until(lambda: router.load(0) == router.load(1) == 0)


@run_async
async def test_worker_with_inconsistent_log_is_excluded_until_replaced() -> None:
    liar, alive = FakePrefill(0), FakePrefill(1)
    place: dict[str, str] = {}
    suspected: dict[str, str] = {}

    async def find(suspects: dict[str, str]) -> dict[str, str]:
        suspected.update(suspects)
        return place

    async with routing([liar, alive], find=find) as router:
        liar.hold = True
        tasks = scores(router, 6)
        await until(lambda: liar.held)
        liar.lie()
        await asyncio.gather(*tasks)
        assert "contradicts itself" in router.problems()[0]
        await until(lambda: suspected)
        assert "contradicts itself" in suspected[await liar.listen()]
        taken = len(liar.taken)
        await asyncio.gather(*scores(router, 6))
        assert len(liar.taken) == taken
        better = FakePrefill(0, epoch=2)
        place |= {"prefill-0": await better.listen(), "prefill-1": await alive.listen()}
        await until(lambda: not router.problems())
        await asyncio.gather(*scores(router, 20))
        assert better.taken
        await better.close()


@run_async
async def test_requests_wait_while_no_worker_is_available() -> None:
    first, second = FakePrefill(0), FakePrefill(0, epoch=2)
    first.hold = True
    place: dict[str, str] = {}
    async with routing([first], find=lister(place)) as router:
        tasks = scores(router, 5)
        await until(lambda: len(first.held) == 5)
        await first.close()
        await until(lambda: router.problems())
        tasks += scores(router, 1)
        place["prefill-0"] = await second.listen()
        await asyncio.gather(*tasks)
        assert len(second.taken) == 6
        await second.close()


@run_async
async def test_requests_fail_after_no_rank_timeout() -> None:
    worker = FakePrefill(0)
    worker.hold = True
    async with routing([worker], no_rank_timeout_s=0.2) as router:
        tasks = scores(router, 3)
        await until(lambda: len(worker.held) == 3)
        await worker.close()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, RankError)
            assert failed.code == "not_ready"
            assert "prefill-0" in failed.message


@run_async
async def test_requests_failed_before_unhealthy_report_are_retried() -> None:
    dying, alive = FakePrefill(0), FakePrefill(1)
    async with routing([dying, alive], tau=40 * 4 * BLOCK) as router:
        shared = list(range(3 * BLOCK))
        dying.hold = alive.hold = True
        tasks = [
            asyncio.create_task(router.score(text))
            for text in (
                Submit(request_id=0, token_ids=[*shared, n], sampling=None, candidates=[1])
                for n in range(60)
            )
        ]
        await until(lambda: dying.held or alive.held)
        if not dying.held:
            dying, alive = alive, dying
        why = f"{dying.name} failed: out of memory"
        dying.refuse, alive.hold = Failed(0, "not_ready", why, 503), False
        alive.release()
        dying.fail_held()
        answers = await asyncio.gather(*tasks)
        assert len(answers) == 60
        met = Counter(tuple(taken.token_ids) for taken in dying.taken)
        assert max(met.values()) == 1, "no request returns to the rank that failed it"


@run_async
async def test_request_ending_two_workers_repeatedly_fails() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]
    for worker in workers:
        worker.refuse = Failed(0, "not_ready", f"{worker.name} failed", 503)
    async with routing(workers, max_attempts=3) as router:
        with pytest.raises(RankError, match="3 prefill workers"):
            await router.score(job(1))
    assert sorted(len(worker.taken) for worker in workers) == [1, 2]


@run_async
async def test_request_error_is_returned_unchanged() -> None:
    worker = FakePrefill(0)
    worker.refuse = Failed(0, "context_length_exceeded", "too long", 413)
    async with routing([worker]) as router:
        with pytest.raises(RankError, match="too long") as caught:
            await router.score(job(1))
        assert caught.value.status == 413
        assert len(worker.taken) == 1


@run_async
async def test_cancelled_requests_leave_backlog_and_worker() -> None:
    worker = FakePrefill(0)
    worker.hold = True
    async with routing([worker], tau=3 * 2 * BLOCK) as router:
        tasks = scores(router, 10)
        await until(lambda: len(worker.held) == 3)
        for task in tasks[:2] + tasks[7:]:
            task.cancel()
        await until(lambda: worker.cancels.qsize() == 2)
        resume(worker)
        await asyncio.gather(*tasks[2:7])
        await until(lambda: router.load(0) == 0)
        assert len(worker.taken) == 2 + 5
        assert not router.waiting()[("prefill", "ls")]


@run_async
async def test_beyond_max_waiting_requests_are_rejected_or_wait_for_slot() -> None:
    worker = FakePrefill(0)
    worker.hold = True
    async with routing([worker], max_waiting=4) as router:
        tasks = scores(router, 4)
        await until(lambda: len(worker.held) == 4)
        with pytest.raises(OverloadError, match="max_waiting"):
            await router.score(job(1))
        wait_for_slot = [
            asyncio.create_task(router.score(job(7000 + n), wait_for_slot=True)) for n in range(9)
        ]
        wait_for_slot[3].cancel()
        resume(worker)
        await asyncio.gather(*tasks, *wait_for_slot[:3], *wait_for_slot[4:])


@run_async
async def test_two_routers_account_for_each_others_requests() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]
    async with routing(workers) as one:
        for worker in workers:
            worker.hold = True
        tasks = scores(one, 6)
        await until(lambda: sum(len(w.held) for w in workers) == 6)
        loads = [one.load(0), one.load(1)]
        async with routing(workers) as other:
            assert [other.load(0), other.load(1)] == loads
            more = scores(other, 3)
            await until(lambda: sum(len(w.held) for w in workers) == 9)
            await until(lambda: one.load(0) == other.load(0) and one.load(1) == other.load(1))
            assert one.number != other.number
            resume(*workers)
            await asyncio.gather(*tasks, *more)
            await until(lambda: one.load(0) == one.load(1) == 0)
            await until(lambda: other.load(0) == other.load(1) == 0)


@run_async
async def test_started_stream_resumes_on_another_worker() -> None:
    dead, alive = FakePrefill(0), FakePrefill(1)
    dead.one_token = True
    async with routing([dead, alive]) as router:
        stream = router.generate(
            Submit(request_id=0, token_ids=[1, 2, 3], sampling=Sampling(max_tokens=3, seed=1))
        )
        batch = await anext(stream)
        assert len(batch) == 1
        await dead.close()
        rest = [event async for batch in stream for event in batch]
        tokens = [token for event in rest[:-1] for token in event.token_ids]  # type: ignore[union-attr]
        assert tokens == [1, 2]
        (resumed,) = alive.taken
        assert (resumed.token_ids, resumed.generated) == ([1, 2, 3, 7], 1)


@pytest.mark.long
@run_async
async def test_no_request_is_lost_while_workers_join_and_leave() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]
    at = {worker.name: await worker.listen() for worker in workers}
    there = {workers[0].name: at[workers[0].name]}
    async with routing(
        workers[:1], coming=workers[1:], tau=2 * BLOCK, find=lister(there)
    ) as router:
        workers[0].hold = workers[1].hold = True
        assert [peer.name for peer in router.clients] == ["prefill-0"]
        first = scores(router, 4)
        await until(lambda: workers[0].held)
        there.update(at)  # another worker takes the queue
        await until(lambda: workers[1].held)
        assert not router.problems()
        del there["prefill-1"]
        await until(lambda: len(router.clients) == 1)
        taken = len(workers[1].taken)
        later = scores(router, 4)
        resume(*reversed(workers))
        await asyncio.gather(*first, *later)
        assert len(workers[1].taken) == taken, "no new requests; open ones are answered"
        await workers[1].close()
        assert router.is_serving
        again = FakePrefill(1, epoch=7)
        there["prefill-1"] = await again.listen()
        await until(lambda: len(router.clients) == 2 and not router.problems())
        workers[0].hold = again.hold = True
        last = scores(router, 6)
        await until(lambda: again.held)
        resume(workers[0], again)
        await asyncio.gather(*last)
        await again.close()


@run_async
async def test_draining_worker_completes_and_is_replaced() -> None:
    leaving, other = workers = [FakePrefill(0), FakePrefill(1)]
    there = {worker.name: await worker.listen() for worker in workers}
    async with routing(workers, tau=2 * BLOCK, find=lister(there)) as router:
        leaving.hold = other.hold = True
        first = scores(router, 4)
        await until(lambda: leaving.held and other.held)
        had = len(leaving.taken)
        leaving.leaving = True
        await until(lambda: "prefill-0 is leaving" in router.problems())
        resume(other)
        await asyncio.gather(*scores(router, 4))
        assert len(leaving.taken) == had, "no new requests"
        leaving.release()
        await asyncio.gather(*first)
        assert (router.load(0), router.load(1)) == (0, 0)
        await leaving.close()
        again = FakePrefill(0, epoch=7)
        there["prefill-0"] = await again.listen()
        await until(lambda: not router.problems())
        while not again.taken:
            await asyncio.gather(*scores(router, 8))
        await again.close()


@run_async
async def test_worker_ending_before_next_poll_loses_no_request() -> None:
    workers = [FakePrefill(0), FakePrefill(1)]
    there = {worker.name: await worker.listen() for worker in workers}
    async with routing(workers, tau=2 * BLOCK, find=lister(there)) as router:
        workers[1].hold = True
        tasks = scores(router, 6)
        await until(lambda: workers[1].held)
        del there["prefill-1"]
        await workers[1].close()
        await asyncio.gather(*tasks)
        await until(lambda: [client.name for client in router.clients] == ["prefill-0"])
        assert not router.problems()
