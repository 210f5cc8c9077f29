"""Exact replay of a schedule: start and end of each task on the four resources.

    attention group   A(t,0) S(t,0) A(t,1) S(t,1)         A(t+1,0) ...
    A2E link               c(0,0) c(0,1) c(1,0) c(1,1)
    expert group                  e(0,0) e(0,1) e(1,0) ...
    E2A link                             c(0,0) c(0,1) ...

Each resource runs one task at a time. Links and experts serve in the order of sending; the
attention group runs the paper's static order, in which a task that waits for a message delays all
behind it. This defines a plan's makespan in the planner. The executor picks among runnable tasks
instead (`actors/engine/executor.py`) and merges token groups at expert ranks.
"""

from typing import NamedTuple

from contracts.traces import Stage, TaskSpan, exposed_communication
from planner.schedule.schedule import MicroBatchTimes, Schedule
from planner.scheduling.task_order import Task, TaskStage, static_order

ATTENTION_GROUP = "attention-0"
A2E_LINK = "attention-0>expert-0"
EXPERT_GROUP = "expert-0"
E2A_LINK = "expert-0>attention-0"
RESOURCES = (ATTENTION_GROUP, A2E_LINK, EXPERT_GROUP, E2A_LINK)


class Replay(NamedTuple):
    """Spans in seconds in the order of placing; totals in ms, by resource.

    exposed_ms: communication during which neither group computes.
    """

    spans: list[TaskSpan]
    makespan_ms: float
    busy_ms: dict[str, float]
    exposed_ms: float


class ScheduleSimulator:
    """Time from which each resource is free, and each micro-batch's next task can start."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.spans: list[TaskSpan] = []
        self.free_ms = dict.fromkeys(RESOURCES, 0.0)
        self.returned_ms = [0.0] * len(schedule.micro_batches)  # last E2A of the layer before

    def run(self, layer: int, micro_batch: int, stage: TaskStage) -> None:
        """Run a task of the attention group as soon as it can start, and all that it sends."""
        times = self.schedule.micro_batches[micro_batch]
        key = (layer, micro_batch)
        if stage is TaskStage.SHARED:
            self._place(ATTENTION_GROUP, Stage.SHARED, 0.0, times.shared_ms, *key)
            return
        end_ms = self._place(
            ATTENTION_GROUP,
            Stage.ATTENTION,
            self.returned_ms[micro_batch],
            times.attention_ms,
            *key,
        )
        if self.schedule.order.shared_before_dispatch and times.shared_ms:
            end_ms = self._place(ATTENTION_GROUP, Stage.SHARED, end_ms, times.shared_ms, *key)
        self.returned_ms[micro_batch] = self._send(times, end_ms, *key)

    def _send(self, times: MicroBatchTimes, ready_ms: float, layer: int, micro_batch: int) -> float:
        """Run A2E, experts and E2A of every token group; return the end of the last."""
        groups = (group for group in times.groups for _ in range(group.repeats))
        for number, group in enumerate(groups):
            key = (layer, micro_batch, number)
            sent_ms = self._place(A2E_LINK, Stage.A2E, ready_ms, group.a2e_ms, *key)
            computed_ms = self._place(EXPERT_GROUP, Stage.EXPERT, sent_ms, group.expert_ms, *key)
            end_ms = self._place(E2A_LINK, Stage.E2A, computed_ms, group.e2a_ms, *key)
        return end_ms

    def _place(
        self, resource: str, stage: Stage, ready_ms: float, length_ms: float, *key: int
    ) -> float:
        start_ms = max(self.free_ms[resource], ready_ms)
        end_ms = start_ms + length_ms
        self.free_ms[resource] = end_ms
        layer, micro_batch, group = (*key, 0)[:3]
        self.spans.append(
            TaskSpan(resource, stage, start_ms / 1e3, end_ms / 1e3, 0, layer, micro_batch, group)
        )
        return end_ms

    def result(self) -> Replay:
        makespan_ms = max(self.free_ms.values())
        busy_ms = {
            resource: 1e3 * sum(s.end_s - s.start_s for s in self.spans if s.resource == resource)
            for resource in RESOURCES
        }
        return Replay(self.spans, makespan_ms, busy_ms, 1e3 * exposed_communication(self.spans))


def replay(schedule: Schedule) -> Replay:
    """Replay the schedule in its static order (FinDEP Section 4.2)."""
    simulator = ScheduleSimulator(schedule)
    for task in attention_tasks(schedule, schedule.num_layers):
        simulator.run(task.layer, task.micro_batch, task.stage)
    return simulator.result()


def attention_tasks(schedule: Schedule, num_layers: int) -> list[Task]:
    """Return the attention group's tasks in the static order."""
    count = len(schedule.micro_batches)
    return [
        task
        for task in static_order(schedule.order, count, num_layers, schedule.shared_lag)
        if task.stage is TaskStage.ATTENTION or has_shared_task(schedule, task.micro_batch)
    ]


def has_shared_task(schedule: Schedule, micro_batch: int) -> bool:
    before = schedule.order.shared_before_dispatch
    return not before and schedule.micro_batches[micro_batch].shared_ms > 0
