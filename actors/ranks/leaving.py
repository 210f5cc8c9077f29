"""A rank that is to go: it says so, ends what it has if there is time, and hands over the rest.

leave ─> RankState.leaving: ingresses send nothing more
         its requests end, or `within_s` is over: they go on elsewhere, from where they are
         LEFT in its notes: whoever asked may end it
"""

from __future__ import annotations

import logging
import threading

from actors.batching.observer import Observer, Serving
from contracts.clock import Clock
from contracts.logs import event
from contracts.worker import LEFT

log = logging.getLogger("tandem.worker")

ON_ITS_WAY_S = 0.3  # what was sent here before it had said so is handed over, and not cut off


class Leaving(Observer):
    """Of a serving loop. left: nothing is left to be done; from any thread."""

    def __init__(self, rank: str, clock: Clock) -> None:
        self.left = threading.Event()
        self._rank, self._clock = rank, clock
        self._until_s: float | None = None
        self._told_s: float | None = None
        self._loop: Serving

    def leave(self, within_s: float) -> None:
        """Called from any thread, and again with less time."""
        until_s = self._clock() + within_s
        self._until_s = until_s if self._until_s is None else min(until_s, self._until_s)

    def begin(self, loop: Serving) -> None:
        self._loop = loop

    def stepped(self) -> None:
        until_s = self._until_s
        if until_s is None or self.left.is_set():
            return
        now_s, sequences = self._clock(), sum(self._loop.load)
        if self._told_s is None:
            self._told_s = now_s
            self._loop.say_leaving()
            event(log, "rank_leaves", logging.WARNING, rank=self._rank, sequences=sequences)
        if sequences and now_s < until_s:
            return
        if sequences:
            event(log, "handed_over", logging.WARNING, rank=self._rank, sequences=sequences)
            self._loop.hand_over()
        if now_s - self._told_s >= ON_ITS_WAY_S:
            self.left.set()

    def notes(self) -> dict[str, str]:
        if self._until_s is None:
            return {}
        if self.left.is_set():
            return {"leaving": LEFT}
        return {"leaving": f"within {max(0.0, self._until_s - self._clock()):.0f} s"}
