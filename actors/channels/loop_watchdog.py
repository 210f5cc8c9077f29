"""Whether a loop still turns. Heartbeats have threads of their own, so that a rank in a long GEMM
is not silent: without this one whose loop hangs would seem well for ever."""

from __future__ import annotations

import asyncio
import logging
import math
import threading

from contracts.clock import Clock, monotonic_s
from contracts.interpreter import thread_stacks
from contracts.logs import event

log = logging.getLogger("tandem.worker")

MAX_CHECK_S = 1.0  # of a look, in case the whole process stood still (SIGSTOP, no CPU time)
CHECK_PERIOD_S = 0.5  # between two looks at an event loop


class LoopWatchdog:
    """The loop calls `record_progress` after each piece of work, one thread that beats calls
    `check` now and
    then. Time counts from the first `record_progress` on, and only while `check` is called.

    problem: what the last look found; empty: the loop turns. stacks_after_s: in one step for so
    long, and the log has the stacks of all threads, once until it moves again.
    """

    def __init__(
        self, name: str, step_timeout_s: float, clock: Clock, stall_threshold_s: float = math.inf
    ) -> None:
        self.problem = ""
        self.stall_threshold_s = stall_threshold_s
        self._is_reported = False
        self._name, self._step_timeout_s, self._clock = name, step_timeout_s, clock
        self._moves = self._seen = 0
        self._stalled_s = 0.0
        self._checked_s = clock()

    def record_progress(self) -> None:
        self._moves += 1

    def check(self) -> str:
        """Returns `problem`."""
        now_s = self._clock()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        if self._moves != self._seen:
            self._seen, self._stalled_s, self._is_reported = self._moves, 0.0, False
        elif self._moves:
            self._stalled_s += min(passed_s, MAX_CHECK_S)
        if self._stalled_s > self.stall_threshold_s and not self._is_reported:
            self._is_reported = True
            stalled_s, stacks = self._stalled_s, thread_stacks()
            event(
                log,
                "event_loop_blocked",
                logging.WARNING,
                rank=self._name,
                stalled_s=stalled_s,
                stacks=stacks,
            )
        is_stalled = self._stalled_s > self._step_timeout_s
        if is_stalled and not self.problem:
            self.problem = (
                f"{self._name} has been stuck in one step for more than {self._step_timeout_s:g} s "
                "(channel.step_timeout_s)"
            )
            event(log, "event_loop_stalled", logging.ERROR, reason=self.problem)
        elif not is_stalled and self.problem:
            event(log, "event_loop_resumed", logging.WARNING, name=self._name)
            self.problem = ""
        return self.problem


class EventLoopWatchdog:
    """The same for an asyncio loop, with a thread of its own. name: of the process."""

    def __init__(self, name: str, stall_threshold_s: float) -> None:
        self._watch = LoopWatchdog(name, math.inf, monotonic_s, stall_threshold_s)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-watch", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """In its thread, or before it runs."""
        self._beat(loop)
        self._thread.start()

    def close(self) -> None:
        """From any thread, as often as one likes."""
        self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch.record_progress()
        if not self._ended.is_set():
            loop.call_later(CHECK_PERIOD_S, self._beat, loop)

    def _run(self) -> None:
        while not self._ended.wait(CHECK_PERIOD_S):
            self._watch.check()
