"""Many coroutines at once, but not too many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def map_bounded(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """Results in the order of `items`, at most `limit` at work at a time.

    The first error cancels the rest and is raised as it is; so does cancelling the caller.
    """
    listed = list(items)
    if len(listed) == 1:  # the usual case, for which a task would be dear
        return [await function(listed[0])]
    numbered = enumerate(listed)
    results: dict[int, Result] = {}

    async def work() -> None:
        for index, item in numbered:
            results[index] = await function(item)

    tasks = [asyncio.ensure_future(work()) for _ in range(min(limit, len(listed)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [results[index] for index in range(len(listed))]
