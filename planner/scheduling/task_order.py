"""Orders of an attention rank's tasks, as policies over the ready set.

FinDEP (Section 4.2) fixes a static order; here the order is a preference among the tasks that can
run now, so that a late message never idles the rank while other work is ready:

    ASAS        A(t,0) S(t,0) A(t,1) S(t,1) ...        micro-batch by micro-batch
    AASS        A(t,0) A(t,1) ... S(t,0) S(t,1) ...    all attention of a layer first
    ASAS lag 1  A(t,0) A(t,1) S(t,0) ... A(t,r1-1) S(t,r1-2) A(t+1,0) S(t,r1-1) A(t+1,1) ...
                                                       shared experts late, beyond the paper

NAIVE and PPPIPE have no S tasks of their own (the executor runs S inside A, before A2E).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from contracts.plan import Order


class TaskStage(enum.IntEnum):
    ATTENTION = 0
    SHARED = 1
    FINISH = 2


class Task(NamedTuple):
    """A task that can run now, up to its next yield. `batch` numbers grow with submission; `layer`
    of FINISH is L."""

    priority: int
    batch: int
    layer: int
    micro_batch: int
    stage: TaskStage
    order: Order
    shared_lag: int = 0
    micro_batches: int = 1  # of its batch; matters with a lag only
    due_s: float = math.inf  # of its batch: of the sequence whose next token is due first
    is_started: bool = False  # it stands at a yield
    slice_s: float = 0.0  # to its next yield, predicted; 0: not known


TaskPolicy = Callable[[Sequence[Task]], Task]


def position(task: Task) -> tuple[int, int, int, int]:
    """Where the plan puts the task among those of its batch. The first number is the layer during
    which it runs: a late shared expert may run during the attention of the next layer."""
    if task.order is Order.AASS:
        return (task.layer, task.stage, task.micro_batch, 0)
    layers, slot = 0, task.micro_batch
    if task.stage is TaskStage.SHARED and task.shared_lag:
        layers, slot = divmod(task.micro_batch + task.shared_lag, task.micro_batches)
    return (task.layer + layers, slot, task.stage, task.micro_batch)


def by_plan(ready: Sequence[Task]) -> Task:
    """The next task: latency-sensitive before best-effort, then whose token is due first, older
    batch before newer, what has begun, then the order of the batch's plan."""
    return min(ready, key=_by_plan)


def _by_plan(task: Task) -> tuple[float, ...]:
    return (task.priority, task.due_s, task.batch, not task.is_started, *position(task))


def by_layer(ready: Sequence[Task]) -> Task:
    """The next task where batches share what a layer needs: latency-sensitive before best-effort,
    what has begun, then whoever is furthest behind, so that all come to a layer before any leaves
    it."""
    return min(
        ready, key=lambda task: (task.priority, not task.is_started, *position(task), task.batch)
    )


def static_order(
    order: Order, micro_batches: int, num_layers: int, shared_lag: int = 0
) -> list[Task]:
    """The A and S tasks of one batch in the order that `by_plan` follows as long as no task waits
    for a message. NAIVE and PPPIPE: S right after its A."""
    tasks = [
        Task(0, 0, layer, micro_batch, stage, order, shared_lag, micro_batches)
        for layer in range(num_layers)
        for micro_batch in range(micro_batches)
        for stage in (TaskStage.ATTENTION, TaskStage.SHARED)
    ]
    return sorted(tasks, key=position)
