"""A line of requests with lanes, so that a large client request does not hold up small ones."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from contracts.routing import Prompt, RequestKey


class Lane(enum.IntEnum):
    """FIRST: the first prompt of a client's request, or its only one. REST: its others. LATER:
    best-effort work."""

    FIRST = 0
    REST = 1
    LATER = 2


class Line:
    """FIRST and REST take turns, LATER goes when both are empty; within a lane it is first come,
    first served. So neither a large request nor many small ones keep the others waiting:

        FIRST  a b c          a P b Q c R S | L
        REST   P Q R S   →
        LATER  L
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, dict[RequestKey, Prompt]] = {lane: {} for lane in Lane}
        self._lane_of: dict[RequestKey, Lane] = {}
        self._turn = Lane.FIRST

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._lane_of)

    def add(self, prompt: Prompt, lane: Lane) -> None:
        self._lanes[lane][prompt.key] = prompt
        self._lane_of[prompt.key] = lane

    def prompt(self, key: RequestKey) -> Prompt:
        return self._lanes[self._lane_of[key]][key]

    def first(self, *, urgent: bool = False) -> RequestKey | None:
        """Whose turn it is. urgent: of the lane FIRST alone."""
        other = Lane.REST if self._turn is Lane.FIRST else Lane.FIRST
        lanes = (Lane.FIRST,) if urgent else (self._turn, other, Lane.LATER)
        return next((key for lane in lanes for key in self._lanes[lane]), None)

    def last(self) -> Iterator[tuple[Lane, RequestKey]]:
        """The last one of each lane that has any, first of all who would wait longest."""
        for lane in reversed(Lane):
            if self._lanes[lane]:
                yield lane, next(reversed(self._lanes[lane]))

    def pop(self, key: RequestKey) -> tuple[Prompt, Lane]:
        """Takes it out; if it was its lane's turn, it is the other's now."""
        lane = self._lane_of.pop(key)
        if lane is self._turn:
            self._turn = Lane.REST if lane is Lane.FIRST else Lane.FIRST
        return self._lanes[lane].pop(key), lane
