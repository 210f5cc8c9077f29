"""One request on one rank, without the ingress: what the rank itself takes."""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.routing.rank_client import RankClient
from contracts.errors import ChannelError
from contracts.messages import Failed, SequenceEvent, Submit, Tokens


async def open_stream(client: RankClient, submit: Submit) -> RankStream:
    """Sends it at once. Raises what `RankClient.post` does."""
    stream = RankStream()
    client.post(submit, stream)
    client.flush()
    return stream


class RankStream:
    """A `rank_client.Sink`: the events, ended by a `Finished`, `Scored` or `Failed`."""

    def __init__(self) -> None:
        self.ended = False
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

    def put(self, event: SequenceEvent) -> None:
        self.ended = not isinstance(event, Tokens)
        self._events.append(event)
        self._arrived.set()

    def on_rank_lost(self, error: ChannelError) -> None:
        self.put(Failed(0, error.code, str(error), error.status))
