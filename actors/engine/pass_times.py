"""How long passes will still take, from how long their parts have taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actors.engine.micro_batch import BatchRun, MicroBatch
from contracts.requests import Priority
from planner.findep.orders import TaskStage
from planner.policies.task_times import TaskTimes
from planner.policies.urgency import LivePass


class PassTimes:
    """Of one executor."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._times = TaskTimes()

    def ran(self, micro_batch: MicroBatch, seconds: float, ended: TaskStage | None) -> None:
        """A slice of a task. ended: what the task was, if it is over."""
        micro_batch.ran_s += seconds
        micro_batch.batch.ran_s += seconds
        self._times.add("slice", micro_batch.tokens, seconds)
        if ended is TaskStage.ATTENTION:
            self._times.add("attention", micro_batch.tokens, micro_batch.ran_s)

    def was_away(self, micro_batch: MicroBatch, now_s: float) -> None:
        """Its rows are back from the experts."""
        self._times.add("away", micro_batch.tokens, now_s - micro_batch.sent_s)

    def slice_s(self, micro_batch: MicroBatch) -> float:
        """To its next yield, predicted."""
        return self._times.predict("slice", micro_batch.tokens)

    def passes(self, runs: Iterable[BatchRun]) -> Iterator[LivePass]:
        """Of the LS batches among them."""
        for run in runs:
            if run.scheduled.priority is Priority.LS:
                yield LivePass(run.scheduled.due_s, self.left_s(run))

    def left_s(self, run: BatchRun) -> float:
        """Until all of it has been through all layers, alone."""
        return max(map(self._left_s, run.micro_batches))

    def _left_s(self, micro_batch: MicroBatch) -> float:
        """Until it has been through all layers, alone."""
        if micro_batch.layer < 0:
            return 0.0
        tokens = micro_batch.tokens
        layer_s = self._times.predict("attention", tokens) + self._times.predict("away", tokens)
        return (self._layers - micro_batch.layer) * layer_s
