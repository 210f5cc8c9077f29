"""A request between the router and its answer, whichever workers it meets on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.errors import ChannelError, RankError, TandemError
from contracts.messages import Failed, Finished, Scored, SequenceEvent, Submit, Tokens
from contracts.metrics import Pipeline
from contracts.requests import Priority
from contracts.routing import Prompt
from planner.routing.line import Lane

_LOST_CODES = frozenset({"not_ready", "peer_lost", "peer_dead", "peer_hung", "channel_error"})


class Ticket:
    """A `rank_client.Sink`. reroute: called when its worker is lost, or refuses to work.

    prompt: as it is booked now (a new key for each attempt). worker: who has it; None: the backlog.
    """

    def __init__(
        self,
        submit: Submit,
        hashes: tuple[bytes, ...],
        lane: Lane,
        reroute: Callable[[Ticket, str], None],
    ) -> None:
        self.submit = submit
        self.hashes = hashes
        self.lane = lane
        self.prompt: Prompt | None = None
        self.worker: int | None = None
        self.request_id = 0
        self.connection = 0  # of that worker
        self.attempts = 0  # that count: see `failed_on`
        self.failed_on: dict[int, int] = {}  # worker → the connection on which it failed this last
        self.counted = True  # among those that wait for a first answer
        self.ended = False
        self.answered = False  # something has come back
        self._reroute = reroute
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    async def next_batch(self) -> list[SequenceEvent]:
        """All events that arrived since the last call, at least one; none come after the end."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._events = self._events, []
        return batch

    def put(self, event: SequenceEvent) -> None:
        if isinstance(event, Failed) and event.code in _LOST_CODES:
            self._moved(event.message, event)
            return
        self._deliver(event)

    def lose(self, error: ChannelError) -> None:
        self._moved(error.message, error)

    def fail(self, error: TandemError) -> None:
        self._deliver(Failed(self.request_id, error.code, error.message, error.status))

    def _moved(self, reason: str, cause: ChannelError | Failed) -> None:
        """A stream that has begun is not begun again: it would be drawn anew."""
        if self.answered:
            self._deliver(Failed(self.request_id, cause.code, reason, cause.status))
        else:
            self._reroute(self, reason)

    def _deliver(self, event: SequenceEvent) -> None:
        if self.ended:
            return
        self.answered = True
        self.ended = not isinstance(event, Tokens)
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def lane_of(submit: Submit, *, patient: bool) -> Lane:
    """patient: it is not the first prompt of its client's request."""
    if submit.priority is Priority.BE:
        return Lane.LATER
    return Lane.REST if patient else Lane.FIRST


def class_of(submit: Submit) -> tuple[str, str]:
    """(pipeline, class), as metrics name them."""
    pipeline = Pipeline.PREFILL if submit.prefill_only else Pipeline.GENERATION
    return pipeline.value, submit.priority.label


def failure_of(event: Tokens | Finished | Scored | Failed) -> RankError:
    if isinstance(event, Failed):
        return RankError(event.message, event.code, event.status)
    return RankError(f"expected a score, got {type(event).__name__}", "no_answer", 500)
