"""Whether a loop still turns. Heartbeats have threads of their own, so that a rank in a long GEMM
is not silent: without this one whose loop hangs would seem well for ever."""

from __future__ import annotations

import asyncio
import logging
import math
import threading

from contracts.clock import Clock, monotonic_s
from contracts.logs import event
from contracts.stacks import thread_stacks

log = logging.getLogger("tandem.worker")

LONGEST_LOOK_S = 1.0  # of a look, in case the whole process stood still (SIGSTOP, no CPU time)
LOOK_S = 0.5  # between two looks at an event loop


class LoopWatch:
    """The loop calls `moved` after each piece of work, one thread that beats calls `look` now and
    then. Time counts from the first `moved` on, and only while `look` is called.

    problem: what the last look found; empty: the loop turns. stacks_after_s: in one step for so
    long, and the log has the stacks of all threads, once until it moves again.
    """

    def __init__(
        self, name: str, stuck_s: float, clock: Clock, stacks_after_s: float = math.inf
    ) -> None:
        self.problem = ""
        self.stacks_after_s = stacks_after_s
        self._has_told = False
        self._name, self._stuck_s, self._clock = name, stuck_s, clock
        self._moves = self._seen = 0
        self._still_s = 0.0
        self._looked_s = clock()

    def moved(self) -> None:
        self._moves += 1

    def look(self) -> str:
        """Returns `problem`."""
        now_s = self._clock()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._moves != self._seen:
            self._seen, self._still_s, self._has_told = self._moves, 0.0, False
        elif self._moves:
            self._still_s += min(passed_s, LONGEST_LOOK_S)
        if self._still_s > self.stacks_after_s and not self._has_told:
            self._has_told = True
            held_s, stacks = self._still_s, thread_stacks()
            event(log, "loop_held", logging.WARNING, rank=self._name, held_s=held_s, stacks=stacks)
        stuck = self._still_s > self._stuck_s
        if stuck and not self.problem:
            self.problem = (
                f"{self._name} has been stuck in one step for more than {self._stuck_s:g} s "
                "(channel.stuck_s)"
            )
            event(log, "loop_stuck", logging.ERROR, reason=self.problem)
        elif not stuck and self.problem:
            event(log, "loop_moves_again", logging.WARNING, name=self._name)
            self.problem = ""
        return self.problem


class EventLoopWatch:
    """The same for an asyncio loop, with a thread of its own. name: of the process."""

    def __init__(self, name: str, stacks_after_s: float) -> None:
        self._watch = LoopWatch(name, math.inf, monotonic_s, stacks_after_s)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"{name}-watch", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """In its thread, or before it runs."""
        self._beat(loop)
        self._thread.start()

    def close(self) -> None:
        """From any thread, as often as one likes."""
        self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch.moved()
        if not self._ended.is_set():
            loop.call_later(LOOK_S, self._beat, loop)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._watch.look()
