"""When whom a rank refuses should come again: once what is too much will have begun, as fast as its
queue has drained of late (planner/scheduling/drain_rate.py). An ingress has a door of its own; here
ends what several of them let in together."""

from __future__ import annotations

from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from contracts.clock import Clock
from contracts.requests import Priority
from planner.scheduling.drain_rate import BACKLOG, DrainRate, retry_after_s


class QueueDrain(Observer):
    """Of one rank: sequences that begin per second, class by class, while enough of them wait to
    tell."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._rates = {priority: DrainRate() for priority in Priority}
        self._started = dict.fromkeys(Priority, 0)  # so far
        self._is_backlog = dict.fromkeys(Priority, False)

    def retry_after_s(self, priority: Priority, excess: int) -> float:
        """When so many of that class will have begun."""
        return retry_after_s(excess, self._rates[priority].per_second(self._clock()))

    def accepted(self, sequence: Sequence) -> None:
        """It is about to wait."""
        priority = sequence.priority
        enough = self._scheduler.num_waiting(priority) + 1 >= BACKLOG
        if enough and not self._is_backlog[priority]:
            self._rates[priority].begin(self._clock())
        self._is_backlog[priority] = enough

    def formed(self, batch: ScheduledBatch) -> None:
        for priority in Priority:
            total = self._scheduler.started_total[priority]
            started, self._started[priority] = total - self._started[priority], total
            enough = self._scheduler.num_waiting(priority) >= BACKLOG
            if started:
                self._rates[priority].leave(started, self._clock(), last=not enough)
                self._is_backlog[priority] = enough
