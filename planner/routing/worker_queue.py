"""A line of requests with lanes, so that a large client request does not hold up small ones."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from contracts.requests import Caller
from contracts.routing_messages import Prompt, RequestKey
from planner.scheduling.fair_queue import FairQueue

ANONYMOUS = Caller()


class Lane(enum.IntEnum):
    """FIRST: the first prompt of a client's request, or its only one. REST: its others. LATER:
    best-effort work."""

    FIRST = 0
    REST = 1
    LATER = 2


class HeldRequest(NamedTuple):
    """A prompt that waits. avoid: workers that have failed it, the last one last."""

    prompt: Prompt
    lane: Lane
    caller: Caller = ANONYMOUS
    avoid: tuple[int, ...] = ()


class WorkerQueue:
    """FIRST and REST take turns, LATER goes when both are empty; within a lane API keys take turns,
    then their requests (planner/scheduling/fair_queue.py), then it is first come, first served. So
    neither a large request nor many small ones keep the others waiting:

        FIRST  a b c          a P b Q c R S | L
        REST   P Q R S   →
        LATER  L
    """

    def __init__(self) -> None:
        self._turns: dict[Lane, FairQueue[RequestKey]] = {lane: FairQueue() for lane in Lane}
        self._lanes: dict[Lane, dict[RequestKey, HeldRequest]] = {
            lane: {} for lane in Lane
        }  # as they came
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
        """Whose turn it is, best-effort work apart. urgent: of the lane FIRST alone."""
        other = Lane.REST if self._turn is Lane.FIRST else Lane.FIRST
        lanes = (Lane.FIRST,) if urgent else (self._turn, other)
        return next((key for lane in lanes if (key := self._turns[lane].peek()) is not None), None)

    def later(self) -> RequestKey | None:
        """Whose turn it is among best-effort work; nobody's while other work waits."""
        if self._lanes[Lane.FIRST] or self._lanes[Lane.REST]:
            return None
        return self._turns[Lane.LATER].peek()

    def last(self) -> Iterator[tuple[Lane, RequestKey]]:
        """The last one of each lane that has any, first of all who would wait longest."""
        for lane in reversed(Lane):
            if self._lanes[lane]:
                yield lane, next(reversed(self._lanes[lane]))

    def pop(self, key: RequestKey, *, is_dispatched: bool = True) -> HeldRequest:
        """Takes it out. goes: it has had its turn; if it was its lane's, it is the other's now."""
        lane = self._lane_of.pop(key)
        if is_dispatched:
            self._turns[lane].take(key)
        else:
            self._turns[lane].remove(key)
        if lane is self._turn:
            self._turn = Lane.REST if lane is Lane.FIRST else Lane.FIRST
        return self._lanes[lane].pop(key)
