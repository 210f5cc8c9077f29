"""So that many at once do not keep an event loop from others."""

from __future__ import annotations

import asyncio
from collections import deque


class Paced:
    """At most `at_once` go on in one turn of the event loop, in the order in which they came."""

    def __init__(self, at_once: int) -> None:
        self._at_once = self._left = at_once
        self._line: deque[asyncio.Future[None]] = deque()
        self._refilling = False

    async def turn(self) -> None:
        """Returns when it is one's turn: at once while there is little to do."""
        loop = asyncio.get_running_loop()
        if not self._refilling:
            self._refilling = True
            loop.call_soon(self._refill)
        if self._left and not self._line:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._line.append(waiter)
        await waiter

    def _refill(self) -> None:
        """In every turn of the loop, until nobody has come in one."""
        self._refilling = bool(self._line) or self._left < self._at_once
        self._left = self._at_once
        while self._line and self._left:
            waiter = self._line.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)
                self._left -= 1
        if self._refilling:
            asyncio.get_running_loop().call_soon(self._refill)
