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

FindRanks = Callable[[dict[str, str]], Awaitable[Mapping[str, str]]]
"""Addresses of ranks that must be replaced, each with the reason → where every rank that takes
requests is now: name → client address."""


class DiscoverableRank(Protocol):
    """present: it is there. serves: it is one of those that there are. contradiction: why it must
    be replaced, though it is there; empty: it need not."""

    client: RankClient

    @property
    def is_available(self) -> bool: ...

    @property
    def is_member(self) -> bool: ...

    @property
    def replace_reason(self) -> str: ...


class RankDiscovery:
    """Asks where the ranks are while one of them is missing; if it `poll_always`, always: then they
    come and go.

    peers: of all numbers that there may be. on_found: is told name -> address.
    """

    def __init__(
        self,
        peers: Sequence[DiscoverableRank],
        find: FindRanks | None,
        on_found: Callable[[Mapping[str, str]], None],
        *,
        poll_always: bool = False,
    ) -> None:
        self._peers = peers
        self._find = find
        self._on_found = on_found
        self._poll_always = poll_always
        self._task: asyncio.Task[None] | None = None

    def ensure_polling(self) -> None:
        """To be called once there is an event loop, as often as one likes."""
        if self._poll_always:
            self.poll()

    def poll(self) -> None:
        if self._find is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._poll_until_found(self._find), name="find-ranks")

    async def close(self) -> None:
        self._find = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _is_rank_missing(self) -> bool:
        return not all(peer.is_available for peer in self._peers if peer.is_member)

    def _suspects(self) -> dict[str, str]:
        return {p.client.address: p.replace_reason for p in self._peers if p.replace_reason}

    async def _poll_until_found(self, find: FindRanks) -> None:
        while self._poll_always or self._is_rank_missing:
            try:
                async with asyncio.timeout(FIND_DEADLINE_S):
                    addresses = await find(self._suspects())
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may do better
                event(log, "directory_not_found", logging.WARNING, error=error)
            else:
                self._on_found(addresses)
            await asyncio.sleep(FIND_PERIOD_S if self._is_rank_missing else FOLLOW_PERIOD_S)
