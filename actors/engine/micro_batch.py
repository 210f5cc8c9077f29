"""A batch in flight and its micro-batches.

A micro-batch is a state machine (see actors/engine/executor.py): `stage` and `layer` name its next
task; `pending` (experts) and `after` what it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.moe.backend import PendingExperts, SharedLayers, WholeBatch
from actors.telemetry.telemetry import SpanGroup, Timeline
from contracts.clock import Clock
from contracts.plan import Plan
from contracts.requests import Priority
from contracts.traces import Stage, TaskSpan
from kernels.device import HostTimes
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch, LastRows
from models.decoder.layer_decoder import LayerEnds
from planner.schedule.batch_plan import chunk_bounds, sequence_ranges
from planner.scheduling.task_order import LatencyPass, Task, TaskStage, TaskTimes


class BatchPart(NamedTuple):
    """Chunks of one micro-batch.

    after: parts whose blocks it reads. previous: the part with the same sequences' preceding chunk.
    """

    chunks: list[Chunk]
    after: frozenset[int]
    previous: int | None


def cut_batch(batch: ScheduledBatch, plan: Plan, costs: Sequence[float]) -> list[BatchPart]:
    """Cut a batch by `plan`. costs: attention cost of each chunk.

    Sequences that share blocks within a part are not cut along their length: the first piece of one
    would need the last piece of another.
    """
    if plan.r1 == 1 and plan.ma is None:
        return [BatchPart(batch.chunks, frozenset(), None)]
    parts: list[BatchPart] = []
    parts_of: list[list[int]] = []  # by chunk of the batch
    for first, last in sequence_ranges(costs, plan):
        members = batch.chunks[first:last]
        needed = {part for chunk in members for other in chunk.after if other < first
                  for part in parts_of[other]}  # fmt: skip
        together = any(other >= first for chunk in members for other in chunk.after)
        ends = plan.sequence_chunks if plan.sequence_chunks and not together else (1.0,)
        first_part = len(parts)
        for pieces in _along_length(members, ends):
            previous = len(parts) - 1 if len(parts) > first_part else None
            after = needed if previous is None else needed | {previous}
            parts.append(BatchPart(pieces, frozenset(after), previous))
        parts_of += [list(range(first_part, len(parts)))] * len(members)
    return parts


def _along_length(chunks: list[Chunk], ends: Sequence[float]) -> list[list[Chunk]]:
    """Return the non-empty pieces of all chunks; a chunk's first piece keeps its copies."""
    bounds = [chunk_bounds(chunk.stop - chunk.start, ends) for chunk in chunks]
    cut = [
        [
            _piece(chunk, *cuts[piece])
            for chunk, cuts in zip(chunks, bounds, strict=True)
            if cuts[piece][0] < cuts[piece][1]
        ]
        for piece in range(len(ends))
    ]
    return [pieces for pieces in cut if pieces]


def _piece(chunk: Chunk, first: int, last: int) -> Chunk:
    start, stop = chunk.start + first, chunk.start + last
    state = chunk.state and chunk.state.cut(start, stop, is_first=not first)
    copies = () if first else chunk.copies
    return chunk._replace(start=start, stop=stop, copies=copies, state=state)


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A slice of a batch's sequences in flight."""

    batch: BatchRun
    index: int
    chunks: list[Chunk]
    tokens: int = field(init=False)
    inputs: AttentionBatch | None = None  # built by the first task
    last: LastRows | None = None  # rows of the last layer; None: all
    steps: Steps[None] | None = None  # of the current task
    doing: tuple[Stage, int] = (Stage.ATTENTION, 0)  # current stage and layer, for spans
    ran_s: float = 0.0  # of the current task
    sent_s: float = 0.0  # time of the last dispatch
    after: list[MicroBatch] = field(default_factory=list)  # those whose blocks it reads
    previous: MicroBatch | None = None  # preceding chunk; it finishes first
    layer: int = 0
    stage: TaskStage = TaskStage.ATTENTION
    attended: int = -1  # last layer whose K and V are in the pool
    hidden_TD: torch.Tensor | None = None
    x_TD: torch.Tensor | None = None
    shared_TD: torch.Tensor | None = None
    pending: PendingExperts | None = None  # experts of the last layer
    whole: WholeBatch | None = None  # if other workers could compute it too
    shared_layers: SharedLayers | None = None  # if they do

    def __post_init__(self) -> None:
        self.tokens = sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def is_ready(self) -> bool:
        if self.stage is TaskStage.SHARED:
            return True
        if self.pending is not None and not self.pending.is_complete:
            return False
        if self.steps is not None:
            return True
        if self.stage is TaskStage.FINISH:
            return self.previous is None or self.previous.layer < 0
        return all(other.attended >= self.layer for other in self.after)

    def task(self, slice_s: float = 0.0) -> Task:
        """Return its next task, up to a yield. slice_s: its predicted duration."""
        run = self.batch
        return Task(
            run.scheduled.priority,
            run.scheduled.number,
            self.layer,
            self.index,
            self.stage,
            run.plan.order,
            run.plan.shared_lag,
            len(run.micro_batches),
            run.scheduled.due_s,
            self.steps is not None,
            slice_s,
        )


@dataclass(slots=True, eq=False)
class BatchRun:
    """A batch in flight. ran_s: total time of its tasks."""

    scheduled: ScheduledBatch
    plan: Plan
    started_s: float
    ran_s: float = 0.0
    micro_batches: list[MicroBatch] = field(default_factory=list)
    remaining: int = 0


class PassTimes:
    """Predicted times of one executor's tasks."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._times = TaskTimes()

    def ran(
        self, micro_batch: MicroBatch, seconds: float, ended: TaskStage | None, *, is_first: bool
    ) -> None:
        """Record a slice of a task. ended: its stage, if the task is complete."""
        if is_first:
            micro_batch.ran_s = 0.0
        micro_batch.ran_s += seconds
        micro_batch.batch.ran_s += seconds
        self._times.add("slice", micro_batch.tokens, seconds)
        if ended is TaskStage.ATTENTION:
            self._times.add("attention", micro_batch.tokens, micro_batch.ran_s)

    def ran_layers(self, count: int, tokens: int, seconds: float) -> None:
        """Record layers of a decode batch with their experts."""
        self._times.add("attention", tokens, seconds / count)
        self._times.add("away", tokens, 0.0)

    def layer_s(self, tokens: int) -> float:
        """Predict the seconds of a layer with its experts; 0: unknown."""
        return self._times.predict("attention", tokens) + self._times.predict("away", tokens)

    def returned(self, micro_batch: MicroBatch, now_s: float) -> None:
        """Record the time between dispatch and combine."""
        self._times.add("away", micro_batch.tokens, now_s - micro_batch.sent_s)

    def slice_s(self, micro_batch: MicroBatch) -> float:
        """Predict the seconds to the next yield."""
        return self._times.predict("slice", micro_batch.tokens)

    def passes(self, runs: Iterable[BatchRun]) -> Iterator[LatencyPass]:
        for run in runs:
            if run.scheduled.priority is Priority.LS:
                yield LatencyPass(run.scheduled.due_s, self.left_s(run))

    def left_s(self, run: BatchRun) -> float:
        """Predict the seconds to the end of a batch that runs alone."""
        return max(map(self._left_s, run.micro_batches))

    def _left_s(self, micro_batch: MicroBatch) -> float:
        if micro_batch.layer < 0:
            return 0.0
        return (self._layers - micro_batch.layer) * self.layer_s(micro_batch.tokens)


class TaskSpans:
    """Records the spans of tasks. name: of the rank. times: of their work."""

    def __init__(self, name: str, timeline: Timeline, clock: Clock, times: HostTimes) -> None:
        self._name, self._timeline, self._clock, self._times = name, timeline, clock, times
        self._since_s = 0.0  # start of the next span
        self._parked: MicroBatch | None = None  # suspended at a yield
        self._parked_s = 0.0

    def resume(self, micro_batch: MicroBatch, now_s: float) -> None:
        """Start a span; continue the suspended one if the same micro-batch runs on."""
        if self._parked is not micro_batch:
            self.close()
            self._since_s = now_s
        self._parked = None

    def pause(self, micro_batch: MicroBatch, now_s: float) -> None:
        self._parked, self._parked_s = micro_batch, now_s

    def note(self, micro_batch: MicroBatch) -> None:
        """Record the end of what it is `doing`."""
        self._add(micro_batch, self._times.mark(self._clock()))

    def end_layers(self, micro_batch: MicroBatch, first: int, ends: LayerEnds) -> None:
        """Record the stages of layers from `first` on, which were run in one call of the host."""
        number, since_s = micro_batch.batch.scheduled.number, self._since_s
        index, tokens, end_s = micro_batch.index, micro_batch.tokens, since_s
        seconds = defaultdict[Stage, list[float]](list)
        for stages in ends:
            for stage, at_s in stages:
                seconds[stage].append(at_s - end_s)
                end_s = at_s
        self._since_s = end_s

        def make() -> list[TaskSpan]:
            found, start_s = list[TaskSpan](), since_s
            for layer, stages in enumerate(ends, first):
                for stage, at_s in stages:
                    task = number, layer, index, 0, tokens
                    found.append(TaskSpan(self._name, stage, start_s, at_s, *task))
                    start_s = at_s
            return found

        if seconds:
            self._timeline.add(SpanGroup(stage, end_s, seconds, make))

    def close(self) -> None:
        """Record the span of the suspended task, before another one runs."""
        if self._parked is not None:
            self._add(self._parked, self._parked_s)
            self._parked = None

    def _add(self, micro_batch: MicroBatch, end_s: float) -> None:
        stage, layer = micro_batch.doing
        number, index = micro_batch.batch.scheduled.number, micro_batch.index
        start_s, self._since_s = self._since_s, end_s
        tokens = micro_batch.tokens

        def record(start_s: float, end_s: float) -> None:
            self._timeline.add(
                TaskSpan(self._name, stage, start_s, end_s, number, layer, index, 0, tokens)
            )

        self._times.measure(start_s, end_s, record)
