"""A queue with lanes, so that a large request does not delay small ones."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from contracts.requests import Caller
from contracts.routing_messages import Prompt, RequestKey
from planner.scheduling.fair_queue import FairQueue

ANONYMOUS = Caller()


class Lane(enum.IntEnum):
    """FIRST: the first prompt of a request. REST: its others. LATER: best-effort work."""

    FIRST = 0
    REST = 1
    LATER = 2


class HeldRequest(NamedTuple):
    """A waiting prompt; avoid: workers that failed it, the last one last."""

    prompt: Prompt
    lane: Lane
    caller: Caller = ANONYMOUS
    avoid: tuple[int, ...] = ()


class WorkerQueue:
    """FIRST and REST alternate, LATER goes when both are empty.

    Within a lane API keys take turns, then their requests (planner/scheduling/fair_queue.py), then
    first come, first served:

        FIRST  a b c          a P b Q c R S | L
        REST   P Q R S   →
        LATER  L
    """

    def __init__(self) -> None:
        self._turns: dict[Lane, FairQueue[RequestKey]] = {lane: FairQueue() for lane in Lane}
        self._lanes: dict[Lane, dict[RequestKey, HeldRequest]] = {
            lane: {} for lane in Lane
        }  # in order of arrival
        self._lane_of: dict[RequestKey, Lane] = {}
        self._turn = Lane.FIRST

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._lane_of)

    def add(self, held: HeldRequest) -> None:
        key, caller = held.prompt.key, held.caller
        self._lanes[held.lane][key] = held
        self._lane_of[key] = held.lane
        self._turns[held.lane].push(
            key, caller.tenant, caller.request, cost=held.prompt.prompt_tokens
        )

    def held(self, key: RequestKey) -> HeldRequest:
        return self._lanes[self._lane_of[key]][key]

    def first(self, *, urgent: bool = False) -> RequestKey | None:
        """Return the next request except best-effort work; urgent: from lane FIRST only."""
        other = Lane.REST if self._turn is Lane.FIRST else Lane.FIRST
        lanes = (Lane.FIRST,) if urgent else (self._turn, other)
        return next((key for lane in lanes if (key := self._turns[lane].peek()) is not None), None)

    def later(self) -> RequestKey | None:
        """Return the next best-effort request if no other work waits."""
        if self._lanes[Lane.FIRST] or self._lanes[Lane.REST]:
            return None
        return self._turns[Lane.LATER].peek()

    def last(self) -> Iterator[tuple[Lane, RequestKey]]:
        """Yield the last request of each lane, the one that would wait longest first."""
        for lane in reversed(Lane):
            if self._lanes[lane]:
                yield lane, next(reversed(self._lanes[lane]))

    def pop(self, key: RequestKey, *, is_dispatched: bool = True) -> HeldRequest:
        """Remove a request. is_dispatched: it had its turn, and the other lane is next."""
        lane = self._lane_of.pop(key)
        if is_dispatched:
            self._turns[lane].take(key)
        else:
            self._turns[lane].remove(key)
        if lane is self._turn:
            self._turn = Lane.REST if lane is Lane.FIRST else Lane.FIRST
        return self._lanes[lane].pop(key)
