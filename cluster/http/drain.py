"""A server that is about to end: it lets nobody in, and answers those that are."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from contracts.errors import NotReadyError

POLL_PERIOD_S = 0.05


class DrainController:
    """On one event loop."""

    def __init__(self) -> None:
        self.is_draining = False

    def check(self) -> None:
        """Raises NotReadyError once it has begun."""
        if self.is_draining:
            raise NotReadyError("this server is ending: ask another one, or again in a while")

    async def drain(self, requests: Collection[object], limit_s: float) -> int:
        """Begins. Returns once nothing of `requests` is under way, or after limit_s: how many are
        left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                while requests:
                    await asyncio.sleep(POLL_PERIOD_S)
        except TimeoutError:
            pass
        return len(requests)
