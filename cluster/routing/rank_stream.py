"""What a connection to a rank hands out: a request's events, the rank's log, its loss."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from contracts.errors import ChannelError
from contracts.messages import Failed, RankState, SequenceEvent, Tokens
from contracts.routing import WorkerReport, WorkerSnapshot


class Sink(Protocol):
    """Where the events of one request go, on the client's event loop."""

    def put(self, event: SequenceEvent) -> None: ...

    def lose(self, error: ChannelError) -> None:
        """The rank is lost before it has ended the request; nothing more arrives."""


class Listener(Protocol):
    """Who must know more of a rank than its answers."""

    def on_log(self, entry: WorkerReport | WorkerSnapshot) -> None:
        """An entry of its log, in order, ahead of the answers that it goes with. Raises
        ChannelError to break the connection."""

    def on_state(self, state: RankState) -> None: ...

    def on_lost(self, error: ChannelError) -> None:
        """The connection is gone, or another attempt at it has failed; ahead of `Sink.lose`."""


class RankStream:
    """The events of one request, ended by a `Finished`, `Scored` or `Failed`."""

    def __init__(self, rank: str, request_id: int, cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.rank = rank
        self.ended = False
        self._cancel = cancel
        self._events: deque[SequenceEvent] = deque()
        self._arrived = asyncio.Event()

    async def next_batch(self) -> list[SequenceEvent]:
        """All events that arrived since the last call, at least one; [] after the end."""
        if self.ended and not self._events:
            return []
        await self._arrived.wait()
        self._arrived.clear()
        batch = list(self._events)
        self._events.clear()
        return batch

    def __aiter__(self) -> RankStream:
        return self

    async def __anext__(self) -> SequenceEvent:
        if not self._events:
            if self.ended:
                raise StopAsyncIteration
            await self._arrived.wait()
        event = self._events.popleft()
        if not self._events:
            self._arrived.clear()
        return event

    def cancel(self) -> None:
        """Tells the rank to drop the request; nothing more arrives. Harmless after the end."""
        if not self.ended:
            self.ended = True
            self._cancel(self.request_id)

    def put(self, event: SequenceEvent) -> None:
        if not self.ended:
            self.ended = not isinstance(event, Tokens)
            self._events.append(event)
            self._arrived.set()

    def lose(self, error: ChannelError) -> None:
        self.put(Failed(self.request_id, error.code, str(error), error.status))
