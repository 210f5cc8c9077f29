"""Many at once, and the loop of others."""

from __future__ import annotations

import asyncio

from cluster.routing.paced import Paced


def test_few_go_on_at_once_and_many_some_in_each_turn_of_the_loop_in_order() -> None:
    async def body() -> None:
        paced, turns, went = Paced(3), 0, list[tuple[int, int]]()

        async def one(number: int) -> None:
            await paced.turn()
            went.append((number, turns))

        await one(-1)
        assert went == [(-1, 0)]
        went.clear()
        tasks = [asyncio.ensure_future(one(number)) for number in range(12)]
        tasks[5].cancel()
        while not all(task.done() for task in tasks):
            turns += 1
            await asyncio.sleep(0)
        assert [number for number, _ in went] == [n for n in range(12) if n != 5]
        for turn in range(turns + 1):
            assert sum(when == turn for _, when in went) <= 3
        for _ in range(4):
            await asyncio.sleep(0)
        went.clear()
        await asyncio.gather(*(one(number) for number in range(3)))
        assert len(went) == 3, "and it is ready for the next ones"

    asyncio.run(asyncio.wait_for(body(), 10))
