"""Admission control: limits, rejections and reservations for retries."""

import asyncio
import functools
import heapq
import itertools
import math
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing import admission_controller
from cluster.routing.admission_controller import AdmissionController, WaitQueue
from cluster.routing.rank_set import RoutingConfig
from contracts.errors import OverloadError
from contracts.messages import Submit
from contracts.requests import Caller, Priority
from planner.scheduling import admission
from tests.support.async_tests import run_async
from tests.support.manual_clock import ManualClock
from tests.support.steps import lines_run

LS, BE = Priority.LS, Priority.BE
PER_SECOND = 1000.0  # throughput of the simulated ranks


class Front:
    """An admission controller with simulated ranks that run one request at a time, LS first."""

    def __init__(self, slots: int = 1000, **config: float) -> None:
        self.clock = ManualClock(100.0)
        self.door = AdmissionController(lambda: slots, RoutingConfig(**config), self.clock)  # type: ignore[arg-type]
        self.waiting: dict[Priority, deque[Submit]] = {LS: deque(), BE: deque()}

    def acquire_nowait(self, submit: Submit) -> float | None:
        """Return the time to retry after; None: admitted."""
        try:
            self.door.acquire_nowait(submit)
        except OverloadError as error:
            return math.ceil(error.retry_after_s)
        self.waiting[submit.priority].append(submit)
        return None

    def fill(self, count: int, priority: Priority, tokens: int = 100) -> int:
        """Return how many of `count` requests are admitted."""
        return sum(self.acquire_nowait(job(priority, tokens)) is None for _ in range(count))

    def run(self, count: int) -> None:
        for _ in range(count):
            queue = self.waiting[LS] or self.waiting[BE]
            done = queue.popleft()
            self.clock.advance(len(done.token_ids) / PER_SECOND)
            self.door.release(done, wait_for_slot=False)


_numbers = itertools.count(1)


def job(priority: Priority, tokens: int = 100, tenant: bytes = b"") -> Submit:
    number = next(_numbers)
    return Submit(
        request_id=number,
        token_ids=[number, *range(1, tokens)],
        sampling=None,
        priority=priority,
        caller=Caller(tenant, number),
    )


def test_ls_beyond_max_wait_gets_429_with_retry_after() -> None:
    front = Front(ls_max_wait_s=5.0)
    front.fill(40, LS)
    front.run(20)
    front.fill(200, LS)
    ahead = sum(len(each.token_ids) for each in front.waiting[LS])
    assert 5.0 * PER_SECOND <= ahead <= 5.0 * PER_SECOND + 100
    times = [front.acquire_nowait(job(LS)) for _ in range(100)]
    retry_after = [wait_s for wait_s in times if wait_s is not None]
    assert len(retry_after) == 100
    assert retry_after[-1] > retry_after[0] + 5  # 100 tokens take 0.1 s


def test_rejection_names_exceeded_limit() -> None:
    front, few = Front(ls_max_wait_s=5.0), Front(slots=40)
    for each in (front, few):
        each.fill(40, LS)
    with pytest.raises(OverloadError, match=r"schedule\.max_waiting"):
        few.door.acquire_nowait(job(LS))
    front.run(20)
    front.fill(200, LS)  # the last ones hold reservations
    front.run(2)
    assert front.door._states[LS].ahead_tokens < 5.0 * PER_SECOND
    with pytest.raises(OverloadError, match=r"priority\.ls_max_wait_s"):
        front.door.acquire_nowait(job(LS))


def test_be_is_admitted_up_to_its_share_of_max_wait() -> None:
    front = Front(be_max_wait_s=50.0, be_share=0.1)
    front.fill(40, LS)
    front.run(30)
    front.fill(200, BE)
    ahead = sum(len(each.token_ids) for each in front.waiting[BE])
    assert ahead == pytest.approx(50.0 * 0.1 * PER_SECOND, abs=200)


def test_rejection_cost_is_constant_in_number_of_reservations() -> None:
    front = Front(ls_max_wait_s=5.0)
    front.fill(40, LS)
    front.run(20)
    front.fill(200, LS)  # up to the limit
    parts = (admission_controller, admission)
    newcomers = [job(LS, tenant=number.to_bytes(8, "big")) for number in range(9000)]
    costs = [lines_run(functools.partial(front.acquire_nowait, one), *parts) for one in newcomers]
    assert max(costs) < 200
    assert len(front.door._states[LS].reservations) == admission.MAX_RESERVATIONS


def test_later_sequences_of_large_request_do_not_block_others() -> None:
    front = Front(ls_max_wait_s=5.0)
    front.fill(40, LS)
    front.run(40)
    for _ in range(500):
        waits = front.door.acquire(job(LS))
        with pytest.raises(StopIteration):
            waits.send(None)
    assert 20 <= front.fill(200, LS) <= 26, "they receive half of the throughput"


def test_client_that_honours_retry_after_is_admitted_at_150_percent_load() -> None:
    """90 % of the clients that wait for Retry-After are admitted at once."""
    rng, front = random.Random(3), Front(ls_max_wait_s=2.0)
    arrivals: list[tuple[float, int, int, Submit]] = []  # time, tie-breaker, rejections
    at_s = 100.0
    for number in range(9000):
        at_s += rng.expovariate(1.5 * PER_SECOND / 100)
        heapq.heappush(arrivals, (at_s, number, 0, job(LS)))
    back = kept = 0
    longest = 0.0
    ends_s, free_s = at_s, 100.0
    while arrivals and arrivals[0][0] < ends_s:
        at_s, number, refused, submit = heapq.heappop(arrivals)
        while front.waiting[LS] and free_s + 0.1 <= at_s:
            free_s += 0.1
            front.clock.now_s = free_s
            front.door.release(front.waiting[LS].popleft(), wait_for_slot=False)
        front.clock.now_s = at_s
        free_s = free_s if front.waiting[LS] else max(free_s, at_s)
        wait_s = front.acquire_nowait(submit)
        longest = max(longest, 0.1 * len(front.waiting[LS]))
        if refused == 1:
            back += 1
            kept += wait_s is None
        if wait_s is not None:
            heapq.heappush(arrivals, (at_s + wait_s, number, refused + 1, submit))
    assert back > 500
    assert kept / back >= 0.9
    assert longest < 2 * 2.0, "admitted requests wait at most max_wait_s"


HOG, SMALL = Caller(b"a", 1), Caller(b"b", 2)


def room_of(places: int) -> WaitQueue:
    return WaitQueue(lambda: places, 0.25)


async def waiting(room: WaitQueue, caller: Caller, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(room.acquire(caller)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def granted(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and not task.cancelled() for task in tasks)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@run_async
async def test_slots_rotate_among_waiting_requests_within_share() -> None:
    room = room_of(8)
    hogs, small = await waiting(room, HOG, 40), await waiting(room, SMALL, 6)
    assert (granted(hogs), granted(small)) == (6, 0), "a single request may exceed its share"
    for turn in (1, 2):
        room.release(HOG)
        await settle()
        assert (granted(hogs), granted(small)) == (6, turn), "up to its share"
    for _ in range(4):
        room.release(HOG)
        await settle()
    assert (granted(hogs), granted(small)) == (6 + 3, 3), "equal shares while both wait"
    for task in small:
        task.cancel()
    room.release(HOG)
    await settle()
    assert granted(hogs) == 6 + 4, "no other request waits"
    for task in hogs:
        task.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)


@given(
    st.lists(st.tuples(st.sampled_from(["wait", "enter", "leave", "cancel"]), st.integers(0, 3)))
)
@run_async
async def test_slots_are_neither_lost_nor_granted_twice_under_cancellation(
    steps: list[tuple[str, int]],
) -> None:
    room, callers = room_of(5), [Caller(b"", n) for n in range(4)]
    tasks: list[tuple[Caller, asyncio.Task[None]]] = []
    held: list[Caller] = []
    for what, number in steps:
        caller = callers[number]
        if what == "wait":
            tasks.append((caller, asyncio.create_task(room.acquire(caller))))
        elif what == "enter" and room.acquire_nowait(caller):
            held.append(caller)
        elif what == "leave" and held:
            room.release(held.pop())
        elif what == "cancel" and tasks:
            tasks[number % len(tasks)][1].cancel()
        if number % 2:  # else several at once
            await settle()
    await settle()
    waits = [pair for pair in tasks if not pair[1].done()]
    held += [c for c, task in tasks if task.done() and not task.cancelled()]
    assert room.in_use == len(held) <= 5
    assert not waits or room.in_use >= 4, "later sequences leave one slot of five"
    while waits:
        room.release(held.pop())
        await settle()
        held += [caller for caller, task in waits if task.done()]
        waits = [pair for pair in waits if not pair[1].done()]
    assert room.in_use == len(held) <= 5
