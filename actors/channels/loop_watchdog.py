"""Watchdogs for loops.

Heartbeats have their own thread so that a rank in a long GEMM is not silent. Without a watchdog a
rank whose loop hangs would look healthy forever.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading

from contracts.clock import Clock, monotonic_s
from contracts.interpreter import thread_stacks
from contracts.logs import event

log = logging.getLogger("tandem.worker")

MAX_CHECK_S = 1.0  # counted per check, in case the whole process stood still (SIGSTOP)
CHECK_PERIOD_S = 0.5  # between two checks of an event loop


class LoopWatchdog:
    """Detects a loop that makes no progress.

    The loop calls `record_progress` after each piece of work; a heartbeat thread calls `check`.
    Time counts from the first `record_progress`, and only while `check` is called.

    problem: result of the last check, "" while the loop makes progress. stall_threshold_s: time in
    one step after which all stacks are logged, once until the next progress.
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
        """Update and return `problem`."""
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
    """Watches an asyncio loop from its own thread. name: the process's."""

    def __init__(self, name: str, stall_threshold_s: float) -> None:
        self._watch = LoopWatchdog(name, math.inf, monotonic_s, stall_threshold_s)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-watch", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching. Call it on the loop's thread, or before the loop runs."""
        self._beat(loop)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Thread-safe; may be called twice."""
        self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch.record_progress()
        if not self._ended.is_set():
            loop.call_later(CHECK_PERIOD_S, self._beat, loop)

    def _run(self) -> None:
        while not self._ended.wait(CHECK_PERIOD_S):
            self._watch.check()
