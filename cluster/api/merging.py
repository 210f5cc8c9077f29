"""The sequences of one request as they come, where it has several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cluster.api.text import Delta

CONCURRENT_SEQUENCES = 256  # of one HTTP request; the rest wait their turn here
_MERGE_BUFFER = 64  # deltas; beyond it the producers wait for the client to read

_Item = tuple[int, Delta]


async def merged(
    deltas_of: Callable[[int], AsyncGenerator[_Item, None]], count: int
) -> AsyncGenerator[_Item, None]:
    """What `deltas_of` 0 to count - 1 yield. The first error ends all of them."""
    items: asyncio.Queue[_Item] = asyncio.Queue(_MERGE_BUFFER)
    waiting = iter(range(count))

    async def work() -> None:
        for index in waiting:
            async with aclosing(deltas_of(index)) as deltas:
                async for item in deltas:
                    await items.put(item)

    workers = [asyncio.ensure_future(work()) for _ in range(min(count, CONCURRENT_SEQUENCES))]
    everything = asyncio.gather(*workers)
    try:
        async with aclosing(_drain(items, everything)) as drained:
            async for item in drained:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, everything, return_exceptions=True)


async def _drain(
    items: asyncio.Queue[_Item], done: asyncio.Future[list[None]]
) -> AsyncGenerator[_Item, None]:
    """Items until `done` is done and nothing is left; raises what `done` raised."""
    getter: asyncio.Future[_Item] = asyncio.ensure_future(items.get())
    try:
        while True:
            await asyncio.wait((getter, done), return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
                getter = asyncio.ensure_future(items.get())
            elif items.empty():
                done.result()
                return
    finally:
        getter.cancel()
