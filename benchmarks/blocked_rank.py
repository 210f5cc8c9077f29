"""A rank's process that accounts for how long LS may have waited for BE: see
benchmarks/priorities/blocking.py.

From when a slice of BE begins to when LS runs next after it, by the loop's processor time and by
the clock: the longest that LS can have been ready meanwhile. `metrics` gives the accounts since it
was asked last, as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from actors.engine.executor import Chosen, Executor
from actors.experts.expert_server import ExpertServer
from actors.experts.merged_call import Call
from actors.ranks.process import main
from actors.ranks.shell import WorkerShell
from contracts.requests import Priority
from planner.findep.expert_queues import QueueHead


class Waits:
    """Of the one rank of this process. waits: slice of BE, slice and all up to LS, both of
    processor time; the latter by the clock. Seconds. slices_s: all of BE, of processor time."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, float, float]] = []
        self.slices_s: list[float] = []
        self._began: tuple[float, float, float] | None = None  # processor, clock, the slice's

    def around(self, priority: int, run: Callable[[], Any]) -> Any:
        cpu_s, clock_s = time.thread_time(), time.monotonic()
        if priority == Priority.LS:
            if self._began is not None:
                began_cpu_s, began_s, slice_s = self._began
                self.waits.append((slice_s, cpu_s - began_cpu_s, clock_s - began_s))
            self._began = None
            return run()
        result = run()
        slice_s = time.thread_time() - cpu_s
        self.slices_s.append(slice_s)
        self._began = cpu_s, clock_s, slice_s
        return result

    def told(self) -> str:
        found = {"waits": self.waits, "slices_s": self.slices_s}
        self.waits, self.slices_s = [], []
        return msgspec.json.encode(found).decode()


WAITS = Waits()


def spy() -> None:
    run_task, run_call = Executor._run, ExpertServer._run

    def task(self: Executor, chosen: Chosen) -> None:
        WAITS.around(chosen.task.priority, partial(run_task, self, chosen))

    def call(self: ExpertServer, head: QueueHead, of: Call) -> None:
        WAITS.around(head.priority, partial(run_call, self, head, of))

    Executor._run = task  # type: ignore[method-assign]
    ExpertServer._run = call  # type: ignore[method-assign, assignment]
    WorkerShell.metrics = lambda self: WAITS.told()  # type: ignore[method-assign]


if __name__ == "__main__":
    spy()
    main()
