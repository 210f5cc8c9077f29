"""Orders of an attention rank's tasks, as policies over the ready set.

FinDEP (Section 4.2) fixes a static order; here the order is a preference among the tasks that can
run now, so that a late message never idles the rank while other work is ready:

    ASAS   A(t,0) S(t,0) A(t,1) S(t,1) ...      micro-batch by micro-batch
    AASS   A(t,0) A(t,1) ... S(t,0) S(t,1) ...  all attention of a layer first

NAIVE and PPPIPE have no S tasks of their own (the executor runs S inside A, before A2E).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from contracts.plan import Order


class TaskStage(enum.IntEnum):
    ATTENTION = 0
    SHARED = 1
    FINISH = 2


class Task(NamedTuple):
    """A task that can run now. `batch` numbers grow with submission; `layer` of FINISH is L."""

    priority: int
    batch: int
    layer: int
    micro_batch: int
    stage: TaskStage
    order: Order


Policy = Callable[[Sequence[Task]], Task]


def _within_batch(task: Task) -> tuple[int, int, int]:
    if task.order is Order.AASS:
        return (task.layer, task.stage, task.micro_batch)
    return (task.layer, task.micro_batch, task.stage)


def by_plan(ready: Sequence[Task]) -> Task:
    """The next task: latency-sensitive before best-effort, older batch before newer, then the
    order of the batch's plan."""
    return min(ready, key=lambda task: (task.priority, task.batch, *_within_batch(task)))
