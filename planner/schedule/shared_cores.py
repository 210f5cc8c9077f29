"""A schedule on ranks that share a machine's cores: how long it takes where more ranks compute than
there are cores.

    rate = min(1, cores / ranks that compute now)

Beyond that, an expert rank that was waiting for tokens goes first when they come, for a slice: it
has had less of the cores than an attention rank that computes all the time, and who is short is
who the system serves. Who waits takes no core. Within a group all ranks are taken to do what its
busiest does, at the same time. As in replay, links move one payload at a time, at their own pace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from planner.schedule.replay import attention_tasks
from planner.schedule.schedule import Schedule
from planner.scheduling.task_order import Task, TaskStage


class Rates(NamedTuple):
    """Of what computes, in parts of a core."""

    attention: float
    experts: float


class Sharing(NamedTuple):
    """Ranks of both groups, all on one machine's cores. slice_ms: for so long who was waiting goes
    first; Linux's is about that."""

    attention_ranks: int
    expert_ranks: int
    cores: float
    slice_ms: float = 3.0

    def rates(self, *, attention: bool, experts: bool, experts_first: bool = False) -> Rates:
        """While these groups compute."""
        attending, serving = self.attention_ranks * attention, self.expert_ranks * experts
        if experts_first and attending and serving:
            left = max(0.0, self.cores - serving)
            return Rates(min(1.0, left / attending), min(1.0, self.cores / serving))
        fair = min(1.0, self.cores / max(1, attending + serving))
        return Rates(fair, fair)


class _Job(NamedTuple):
    """A token group's experts: when it is there, and what it takes alone. is_last: of its
    micro-batch in that layer."""

    arrives_ms: float
    expert_ms: float
    e2a_ms: float
    micro_batch: int
    is_last: bool


class _Machine:
    """Simulated time, in ms. `left`: of a task that runs, what it would still take alone."""

    def __init__(self, layers: Sequence[Schedule], sharing: Sharing) -> None:
        self.layers, self.sharing = layers, sharing
        self.now = self.end = self.a2e_free = self.e2a_free = 0.0
        self.tasks = deque(attention_tasks(layers[0], len(layers)))
        self.jobs: deque[_Job] = deque()
        self.task: Task | None = None
        self.job: _Job | None = None
        self.task_left = self.job_left = 0.0
        self.first_left = 0.0  # of the slice in which the job goes first
        self.served_ms = -1.0  # when the experts ended their last job
        self.returned = [0.0] * len(layers[0].micro_batches)  # inf: experts have it

    def run(self) -> float:
        while self.tasks or self.jobs or self.task or self.job:
            self._begin()
            rates = self.sharing.rates(
                attention=self.task is not None,
                experts=self.job is not None,
                experts_first=self.first_left > 0,
            )
            task_end = self._ends(self.task, self.task_left, rates.attention)
            job_end = self._ends(self.job, self.job_left, rates.experts)
            first_end = job_end
            if self.first_left > 0:
                first_end = self._ends(self.job, self.first_left, rates.experts)
            now = min(task_end, job_end, first_end, self._begins())
            self.task_left -= (now - self.now) * rates.attention
            self.job_left -= (now - self.now) * rates.experts
            self.first_left -= (now - self.now) * rates.experts
            if first_end <= now:
                self.first_left = 0.0
            self.now = now
            if task_end <= now:
                self._end_task()
            if job_end <= now:
                self._end_job()
        return max(self.end, self.now)

    def _ends(self, running: object, left: float, rate: float) -> float:
        return math.inf if running is None or rate == 0 else self.now + max(0.0, left) / rate

    def _begins(self) -> float:
        """When something that is to begin next could; inf: not before something ends."""
        times = [math.inf]
        if self.task is None and self.tasks:
            times.append(self._ready(self.tasks[0]))
        if self.job is None and self.jobs:
            times.append(self.jobs[0].arrives_ms)
        return max(self.now, min(times))

    def _begin(self) -> None:
        if self.task is None and self.tasks and self._ready(self.tasks[0]) <= self.now:
            self.task = self.tasks.popleft()
            times = self.layers[self.task.layer].micro_batches[self.task.micro_batch]
            is_shared = self.task.stage is TaskStage.SHARED
            self.task_left = times.shared_ms if is_shared else times.attention_ms
            if not is_shared and self.layers[0].order.shared_before_dispatch:
                self.task_left += times.shared_ms
        if self.job is None and self.jobs and self.jobs[0].arrives_ms <= self.now:
            self.job = self.jobs.popleft()
            self.job_left = self.job.expert_ms
            was_waiting = self.served_ms < self.job.arrives_ms
            self.first_left = min(self.sharing.slice_ms, self.job_left) if was_waiting else 0.0

    def _ready(self, task: Task) -> float:
        return 0.0 if task.stage is TaskStage.SHARED else self.returned[task.micro_batch]

    def _end_task(self) -> None:
        assert self.task is not None
        if self.task.stage is TaskStage.ATTENTION:
            self._send(self.task)
        self.task = None

    def _end_job(self) -> None:
        assert self.job is not None
        self.served_ms, self.first_left = self.now, 0.0
        back = self.e2a_free = max(self.e2a_free, self.now) + self.job.e2a_ms
        self.end = max(self.end, back)
        if self.job.is_last:
            self.returned[self.job.micro_batch] = back
        self.job = None

    def _send(self, task: Task) -> None:
        groups = self.layers[task.layer].micro_batches[task.micro_batch].groups
        every = [group for group in groups for _ in range(group.repeats)]
        self.returned[task.micro_batch] = math.inf
        for number, group in enumerate(every):
            self.a2e_free = max(self.a2e_free, self.now) + group.a2e_ms
            is_last = number + 1 == len(every)
            self.jobs.append(
                _Job(self.a2e_free, group.expert_ms, group.e2a_ms, task.micro_batch, is_last)
            )


def shared_makespan_ms(layers: Sequence[Schedule], sharing: Sharing) -> float:
    """Of one plan, a schedule for each layer: what `makespan_of_layers_ms` says where every rank
    has a core; longer where they share."""
    return _Machine(layers, sharing).run()
