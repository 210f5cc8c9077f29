"""The queue for slots of sequences without a first answer."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.admission_controller import WaitQueue
from contracts.requests import Caller
from tests.support.async_tests import run_async

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
async def test_waiting_sequences_leave_slots_to_first_sequences_of_others() -> None:
    room = room_of(8)
    hogs = await waiting(room, HOG, 20)
    assert granted(hogs) == 6
    assert [room.acquire_nowait(Caller(b"b", n)) for n in range(3)] == [True, True, False]
    for task in hogs:
        task.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)


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
