"""Places of sequences without an answer: who gets one, who waits, and how long one is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.wait_queue import WaitQueue
from contracts.requests import Caller
from planner.policies.drain import LONGEST_S, SHORTEST_S, DrainRate, retry_after_s

HOG, SMALL = Caller(b"a", 1), Caller(b"b", 2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 20))


def room_of(places: int, clock: Clock | None = None) -> WaitQueue:
    return WaitQueue(lambda: places, 0.25, clock or Clock())


async def waiting(room: WaitQueue, caller: Caller, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(room.wait(caller)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def granted(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and not task.cancelled() for task in tasks)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_patient_sequences_of_one_request_leave_places_to_the_first_ones_of_others() -> None:
    """FINDINGS A6: 122 of 126 small requests were refused beside one that kept all places."""

    async def body() -> None:
        room = room_of(8)
        hogs = await waiting(room, HOG, 20)
        assert granted(hogs) == 6
        assert [room.enter(Caller(b"b", n)) for n in range(3)] == [True, True, False]
        for task in hogs:
            task.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)

    run(body())


def test_places_go_by_turns_to_requests_in_line_and_none_keeps_more_than_its_share() -> None:
    """FINDINGS A6."""

    async def body() -> None:
        room = room_of(8)
        hogs, small = await waiting(room, HOG, 40), await waiting(room, SMALL, 6)
        assert (granted(hogs), granted(small)) == (6, 0), "alone it may have more"
        for turn in (1, 2):
            room.leave(HOG)
            await settle()
            assert (granted(hogs), granted(small)) == (6, turn), "until it has its share"
        for _ in range(4):
            room.leave(HOG)
            await settle()
        assert (granted(hogs), granted(small)) == (6 + 3, 3), "as many each while both wait"
        for task in small:
            task.cancel()
        room.leave(HOG)
        await settle()
        assert granted(hogs) == 6 + 4, "nobody else is in line"
        for task in hogs:
            task.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)

    run(body())


@given(
    st.lists(st.tuples(st.sampled_from(["wait", "enter", "leave", "cancel"]), st.integers(0, 3)))
)
def test_places_are_never_lost_nor_given_twice_whoever_cancels(
    steps: list[tuple[str, int]],
) -> None:
    async def body() -> None:
        room, callers = room_of(5), [Caller(b"", n) for n in range(4)]
        tasks: list[tuple[Caller, asyncio.Task[None]]] = []
        held: list[Caller] = []
        for what, number in steps:
            caller = callers[number]
            if what == "wait":
                tasks.append((caller, asyncio.create_task(room.wait(caller))))
            elif what == "enter" and room.enter(caller):
                held.append(caller)
            elif what == "leave" and held:
                room.leave(held.pop())
            elif what == "cancel" and tasks:
                tasks[number % len(tasks)][1].cancel()
            if number % 2:  # else several happen at once
                await settle()
        await settle()
        waits = [pair for pair in tasks if not pair[1].done()]
        held += [c for c, task in tasks if task.done() and not task.cancelled()]
        assert room.taken == len(held) <= 5
        assert not waits or room.taken >= 4, "who is patient leaves one place of five"
        while waits:
            room.leave(held.pop())
            await settle()
            held += [caller for caller, task in waits if task.done()]
            waits = [pair for pair in waits if not pair[1].done()]
        assert room.taken == len(held) <= 5

    run(body())


def test_retry_after_is_what_waits_over_how_fast_it_has_left() -> None:
    async def body() -> None:
        clock = Clock()
        room = room_of(100, clock)
        assert room.retry_after_s == SHORTEST_S, "nothing is known yet"
        for _ in range(100):
            assert room.enter(HOG)
        for _ in range(50):  # two a second
            clock.now_s += 0.5
            room.leave(HOG)
            assert room.enter(HOG)
        assert 45 < room.retry_after_s < 55
        for _ in range(2000):  # twenty a second
            clock.now_s += 0.05
            room.leave(HOG)
            assert room.enter(HOG)
        assert 4.9 < room.retry_after_s < 5.2
        clock.now_s += 300
        assert room.retry_after_s == LONGEST_S, "it has stood still since"

    run(body())


def test_time_in_which_nothing_waits_does_not_count_as_slow() -> None:
    rate = DrainRate()
    for hour in range(3):
        now_s = 3600.0 * hour
        rate.begin(now_s)
        for index in range(10):
            now_s += 0.1
            rate.leave(now_s, last=index == 9)
        assert abs((rate.per_second(now_s + 60) or 0) - 10) < 1e-6


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
def test_nobody_is_told_to_wait_less_than_a_second_or_more_than_a_minute(
    ahead: int, per_second: float
) -> None:
    told = retry_after_s(ahead, per_second)
    assert SHORTEST_S <= told <= LONGEST_S
    assert told in (SHORTEST_S, LONGEST_S) or told == ahead / per_second
