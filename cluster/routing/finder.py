"""Where the ingress looks for ranks that are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from cluster.routing.rank_client import RankClient
from contracts.logs import event

log = logging.getLogger("tandem.routing")

FIND_PERIOD_S = 0.3
FOLLOW_PERIOD_S = 1.0
FIND_DEADLINE_S = 10.0

Find = Callable[[dict[str, str]], Awaitable[Mapping[str, str]]]
"""Addresses of ranks that must be replaced, each with the reason → where every rank that takes
requests is now: name → client address."""


class Sought(Protocol):
    """present: it is there. serves: it is one of those that there are. contradiction: why it must
    be replaced, though it is there; empty: it need not."""

    client: RankClient

    @property
    def present(self) -> bool: ...

    @property
    def serves(self) -> bool: ...

    @property
    def contradiction(self) -> str: ...


class Finder:
    """Asks where the ranks are while one of them is missing; if it `follows`, always: then they
    come and go.

    peers: of all numbers that there may be. on_found: is told name -> address.
    """

    def __init__(
        self,
        peers: Sequence[Sought],
        find: Find | None,
        on_found: Callable[[Mapping[str, str]], None],
        *,
        follows: bool = False,
    ) -> None:
        self._peers = peers
        self._find = find
        self._on_found = on_found
        self._follows = follows
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """To be called once there is an event loop, as often as one likes."""
        if self._follows:
            self.look()

    def look(self) -> None:
        if self._find is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._look(self._find), name="find-ranks")

    async def close(self) -> None:
        self._find = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _is_missing(self) -> bool:
        return not all(peer.present for peer in self._peers if peer.serves)

    def _suspects(self) -> dict[str, str]:
        return {p.client.address: p.contradiction for p in self._peers if p.contradiction}

    async def _look(self, find: Find) -> None:
        while self._follows or self._is_missing:
            try:
                async with asyncio.timeout(FIND_DEADLINE_S):
                    addresses = await find(self._suspects())
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may do better
                event(log, "directory_not_found", logging.WARNING, error=error)
            else:
                self._on_found(addresses)
            await asyncio.sleep(FIND_PERIOD_S if self._is_missing else FOLLOW_PERIOD_S)
