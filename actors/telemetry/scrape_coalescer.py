"""Metrics for any number of askers at the price of one: a scrape at a time, and not too often."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from contracts.clock import Clock

SHARE = 0.05  # of the loop's time at most
MAX_PAUSE_S = 1.0
ANSWER_S = 0.0003  # of the loop's time, for each asker


class ScrapeCoalescer:
    """`text()` is made by one call of `make`, begun after it was asked for, and shared by all who
    asked before it began. After a scrape the next one waits until it and its answers were
    at most SHARE of the time: who asks without end slows down himself, and not the requests.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[str]],
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = make
        self._clock = clock
        self._sleep = sleep
        self._next: asyncio.Future[str] | None = None
        self._waiters = 0
        self._free_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def text(self) -> str:
        """Raises what the scrape raises. An asker who leaves takes nothing from the others."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            # Nobody may be left to hear of an error.
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiters += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                pause_s = self._free_s - self._clock()
                if pause_s > 0:
                    await self._sleep(pause_s)
                answer, waiters = self._next, self._waiters
                self._next, self._waiters = None, 0
                start_s = self._clock()
                try:
                    answer.set_result(await self._make())
                except Exception as error:  # noqa: BLE001 - all who asked raise it
                    answer.set_exception(error)
                end_s = self._clock()
                cost_s = end_s - start_s + ANSWER_S * waiters
                self._free_s = end_s + min(MAX_PAUSE_S, cost_s * (1 / SHARE - 1))
        finally:
            self._task = None
