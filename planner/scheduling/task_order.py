"""Order of the tasks of attention ranks and of the queues of expert ranks.

FinDEP (Section 4.2) fixes a static order; here it is a preference among runnable tasks, so that a
late message never idles the rank:

    ASAS        A(t,0) S(t,0) A(t,1) S(t,1) ...        micro-batch by micro-batch
    AASS        A(t,0) A(t,1) ... S(t,0) S(t,1) ...    all attention of a layer first
    ASAS lag 1  A(t,0) A(t,1) S(t,0) ... A(t,r1-1) S(t,r1-2) A(t+1,0) S(t,r1-1) A(t+1,1) ...
                                                       late shared experts, beyond the paper

NAIVE and PPPIPE have no S tasks of their own (the executor runs S inside A, before A2E).
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from contracts.plan import Order


class QueueHead(NamedTuple):
    """A queue of token groups of one class at one layer, or a started call at a yield.

    missing: needed experts that are not loaded. number: of the started call. generation: of the
    placement of the groups.
    """

    priority: int
    layer: int
    oldest_arrival_s: float
    groups: int
    tokens: int = 0
    is_started: bool = False
    slice_s: float = 0.0  # predicted time to its next yield; 0: unknown
    missing: int = 0
    number: int = 0
    generation: int = 0


def oldest_of_highest_class(heads: Sequence[QueueHead]) -> QueueHead:
    """Return the next head: LS first, then by missing experts, started calls, oldest arrival."""
    return min(heads, key=_turn)


def _turn(head: QueueHead) -> tuple[int, bool, bool, float]:
    return head.priority, head.missing > 0, not head.is_started, head.oldest_arrival_s


class TaskStage(enum.IntEnum):
    ATTENTION = 0
    SHARED = 1
    FINISH = 2


class Task(NamedTuple):
    """A runnable task up to its next yield.

    `batch` numbers grow with submission; `layer` of FINISH is L.
    """

    priority: int
    batch: int
    layer: int
    micro_batch: int
    stage: TaskStage
    order: Order
    shared_lag: int = 0
    micro_batches: int = 1  # of its batch; used with a lag only
    due_s: float = math.inf  # earliest due time in its batch
    is_started: bool = False  # suspended at a yield
    slice_s: float = 0.0  # predicted time to its next yield; 0: unknown


TaskPolicy = Callable[[Sequence[Task]], Task]


def position(task: Task) -> tuple[int, int, int, int]:
    """Return the plan's position of the task within its batch.

    The first number is the layer during which it runs: a late shared expert may run during the
    attention of the next layer.
    """
    if task.order is Order.AASS:
        return (task.layer, task.stage, task.micro_batch, 0)
    layers, slot = 0, task.micro_batch
    if task.stage is TaskStage.SHARED and task.shared_lag:
        layers, slot = divmod(task.micro_batch + task.shared_lag, task.micro_batches)
    return (task.layer + layers, slot, task.stage, task.micro_batch)


def by_plan(ready: Sequence[Task]) -> Task:
    """Return the next task: LS first, then by due time, batch, started, and the plan's order."""
    return min(ready, key=_by_plan)


def _by_plan(task: Task) -> tuple[float, ...]:
    return (task.priority, task.due_s, task.batch, not task.is_started, *position(task))


def by_layer(ready: Sequence[Task]) -> Task:
    """Return the next task for batches that share a layer's experts.

    LS first, then started tasks, then the batch furthest behind, so all reach a layer before any
    leaves it.
    """
    return min(
        ready, key=lambda task: (task.priority, not task.is_started, *position(task), task.batch)
    )


def static_order(
    order: Order, micro_batches: int, num_layers: int, shared_lag: int = 0
) -> list[Task]:
    """Return the A and S tasks of one batch in the order of `by_plan` without late messages.

    NAIVE and PPPIPE: S right after its A.
    """
    tasks = [
        Task(0, 0, layer, micro_batch, stage, order, shared_lag, micro_batches)
        for layer in range(num_layers)
        for micro_batch in range(micro_batches)
        for stage in (TaskStage.ATTENTION, TaskStage.SHARED)
    ]
    return sorted(tasks, key=position)
