"""Whether a loop still turns. Heartbeats have threads of their own, so that a rank in a long GEMM
is not silent: without this one whose loop hangs would seem well for ever."""

from __future__ import annotations

import logging

from contracts.clock import Clock
from contracts.logs import event

log = logging.getLogger("tandem.worker")

LONGEST_LOOK_S = 1.0  # of a look, in case the whole process stood still (SIGSTOP, no CPU time)


class LoopWatch:
    """The loop calls `moved` after each piece of work, one thread that beats calls `look` now and
    then. Time counts from the first `moved` on, and only while `look` is called.

    problem: what the last look found; empty: the loop turns.
    """

    def __init__(self, name: str, stuck_s: float, clock: Clock) -> None:
        self.problem = ""
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
            self._seen, self._still_s = self._moves, 0.0
        elif self._moves:
            self._still_s += min(passed_s, LONGEST_LOOK_S)
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
