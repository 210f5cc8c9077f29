"""The limit of starts per turn of the event loop."""

from __future__ import annotations

import asyncio

from cluster.routing.pipeline_backend import LoopThrottle
from tests.support.async_tests import run_async


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
