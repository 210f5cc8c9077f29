"""Who waits for room where all is full: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """On one event loop."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Returns once `wake_next` has come to this one. There may be no room after all."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake_next()
            raise

    def wake_next(self) -> None:
        """Call when a place has become free."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
