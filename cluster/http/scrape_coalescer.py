"""Coalescing of concurrent scrapes, and a bound on the time they take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from contracts.clock import Clock

SHARE = 0.05  # maximum fraction of the loop's time
MAX_PAUSE_S = 1.0
ANSWER_S = 0.0003  # time of the loop per response


class ScrapeCoalescer:
    """Shares one call of `make` among concurrent callers of `text`.

    A caller gets a text whose collection started after its call. The next collection is delayed
    until the previous one and its responses are at most SHARE of the time, so a client that scrapes
    in a loop slows down itself and not the requests.
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
        """Return the text; raises what `make` raises. Other callers survive cancellation."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            # Mark an exception as retrieved if every caller was cancelled.
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
                except Exception as error:  # noqa: BLE001 - raised by every caller
                    answer.set_exception(error)
                end_s = self._clock()
                cost_s = end_s - start_s + ANSWER_S * waiters
                self._free_s = end_s + min(MAX_PAUSE_S, cost_s * (1 / SHARE - 1))
        finally:
            self._task = None
