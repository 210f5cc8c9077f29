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

from benchmarks.slice_trace import Part, Tracer, spy_on_compiling

spy_on_compiling()  # before torch is imported

from actors.batching.scheduler import Scheduler  # noqa: E402
from actors.engine.executor import Chosen, Executor  # noqa: E402
from actors.engine.micro_batch import MicroBatch  # noqa: E402
from actors.moe.expert_server import ExpertServer  # noqa: E402
from actors.moe.merged_call import MergedCall  # noqa: E402
from actors.moe.remote_backend import RemoteBackend  # noqa: E402
from actors.ranks.serving_loop import ServingLoop  # noqa: E402
from actors.ranks.shell import WorkerShell  # noqa: E402
from contracts.requests import Priority  # noqa: E402
from kernels.steps import Steps  # noqa: E402
from planner.scheduling.expert_queues import QueueHead  # noqa: E402
from tests.support.rank_process import main  # noqa: E402

LONG_S = 0.006  # a slice, or a wait, of which the parts are kept


class Waits:
    """Of the one rank of this process. waits: slice of BE, slice and all up to LS, both of
    processor time; the latter by the clock. Seconds. slices_s: all of BE, of processor time.
    long: of slices and waits that were, how long in s, and their parts."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._of_slice: list[Part] = []
        self._clear()
        self._began: tuple[float, float, float] | None = None  # processor, clock, the slice's

    def around(self, priority: int, run: Callable[[], Any]) -> Any:
        cpu_s, clock_s = time.thread_time(), time.monotonic()
        parts = self.tracer.taken()
        if priority == Priority.LS:
            if self._began is not None:
                began_cpu_s, began_s, slice_s = self._began
                self.waits.append((slice_s, cpu_s - began_cpu_s, clock_s - began_s))
                self._keep("wait", cpu_s - began_cpu_s, [*self._of_slice, *parts])
            self._began = None
            return run()
        result = run()
        slice_s = time.thread_time() - cpu_s
        self.slices_s.append(slice_s)
        self._of_slice = self.tracer.taken()
        self._keep("slice", slice_s, self._of_slice)
        self._began = cpu_s, clock_s, slice_s
        return result

    def told(self) -> str:
        found = {"waits": self.waits, "slices_s": self.slices_s, "long": self.long}
        self._clear()
        return msgspec.json.encode(found).decode()

    def _keep(self, kind: str, seconds: float, parts: list[Part]) -> None:
        if seconds > LONG_S:
            self.long.append((kind, seconds, parts))

    def _clear(self) -> None:
        self.waits: list[tuple[float, float, float]] = []
        self.slices_s: list[float] = []
        self.long: list[tuple[str, float, list[Part]]] = []


WAITS = Waits()


def spy() -> None:
    run_task, run_call = Executor._run, ExpertServer._run

    def task(self: Executor, chosen: Chosen) -> None:
        WAITS.around(chosen.task.priority, partial(run_task, self, chosen))

    def call(self: ExpertServer, head: QueueHead, of: MergedCall) -> None:
        WAITS.around(head.priority, partial(run_call, self, head, of))

    Executor._run = task  # type: ignore[method-assign]
    ExpertServer._run = call  # type: ignore[method-assign, assignment]
    WorkerShell.metrics = lambda self: WAITS.told()  # type: ignore[method-assign]
    _trace(WAITS.tracer)


def _trace(tracer: Tracer) -> None:
    start, task_of, made = WorkerShell.start, Executor._task, MergedCall.__init__

    def starts(self: WorkerShell) -> None:
        tracer.take_log()
        start(self)

    def task(self: Executor, micro_batch: MicroBatch) -> Steps[None]:
        name = f"{micro_batch.stage} of layer {micro_batch.layer}, {micro_batch.tokens} tokens"
        return tracer.steps(name, task_of(self, micro_batch))

    def call(self: MergedCall, *args: Any) -> None:
        made(self, *args)
        steps = self.computation.steps
        self.computation.steps = tracer.steps(f"experts, {self.tokens} tokens", steps)  # type: ignore[misc]

    WorkerShell.start = starts  # type: ignore[method-assign]
    Executor._task = task  # type: ignore[method-assign]
    MergedCall.__init__ = call  # type: ignore[method-assign, assignment]
    for owner, names in _FUNCTIONS.items():
        for name in names:
            tracer.around(owner, name)


_FUNCTIONS: dict[type, tuple[str, ...]] = {
    ServingLoop: ("_receive", "_form_batches", "send_answers", "_check_when_idle"),
    Scheduler: ("complete", "next_batch"),
    Executor: ("_ready", "submit", "_pick"),
    RemoteBackend: ("poll",),
    ExpertServer: ("_poll", "_call", "_next", "_finish"),
}


if __name__ == "__main__":
    spy()
    main()
