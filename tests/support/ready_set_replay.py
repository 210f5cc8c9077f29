"""Replay of a schedule as `actors/engine/executor.py` runs it.

`replay` runs the tasks of the attention group in the static order. Here a policy picks among the
tasks that can start. Under AASS and late shared experts the two differ where the next attention
waits for its experts.
"""

from planner.schedule.schedule import (
    ATTENTION_GROUP,
    Replay,
    Schedule,
    ScheduleSimulator,
    attention_tasks,
    has_shared_task,
)
from planner.scheduling.task_order import Task, TaskPolicy, TaskStage, by_plan


def replay_ready_set(schedule: Schedule, policy: TaskPolicy = by_plan) -> Replay:
    """Run the schedule as a ready set: `policy` picks among the tasks that can start now."""
    simulator = ScheduleSimulator(schedule)
    waiting = {
        task.micro_batch: task
        for task in attention_tasks(schedule, 1)
        if task.stage is TaskStage.ATTENTION
    }
    while waiting:
        now_ms = max(
            simulator.free_ms[ATTENTION_GROUP],
            min(_ready_ms(simulator, task) for task in waiting.values()),
        )
        ready = [task for task in waiting.values() if _ready_ms(simulator, task) <= now_ms]
        task = policy(ready)
        simulator.run(task.layer, task.micro_batch, task.stage)
        following = _following(schedule, task)
        if following is None:
            del waiting[task.micro_batch]
        else:
            waiting[task.micro_batch] = following
    return simulator.result()


def _ready_ms(simulator: ScheduleSimulator, task: Task) -> float:
    return 0.0 if task.stage is TaskStage.SHARED else simulator.returned_ms[task.micro_batch]


def _following(schedule: Schedule, task: Task) -> Task | None:
    if task.stage is TaskStage.ATTENTION and has_shared_task(schedule, task.micro_batch):
        return task._replace(stage=TaskStage.SHARED)
    if task.layer + 1 == schedule.num_layers:
        return None
    return task._replace(stage=TaskStage.ATTENTION, layer=task.layer + 1)
