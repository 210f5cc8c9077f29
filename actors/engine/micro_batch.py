"""A batch in flight on an attention rank, and the micro-batches it is cut into.

Each micro-batch is a small state machine (actors/engine/executor.py draws it): `stage` and `layer`
say what it would run next, `pending` (its experts) and `after` what it still waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.experts.plane import Pending
from contracts.events import Stage
from contracts.plan import Plan
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch, LastRows
from planner.findep.orders import Task, TaskStage
from planner.findep.split import chunk_bounds, sequence_ranges


class Part(NamedTuple):
    """What becomes a micro-batch, in terms of its index among the parts of a batch. `after`: those
    whose blocks it reads; `previous`: the one with the chunk before it of the same sequences."""

    chunks: list[Chunk]
    after: frozenset[int]
    previous: int | None


def cut_batch(batch: ScheduledBatch, plan: Plan, costs: Sequence[float]) -> list[Part]:
    """The batch as `plan` cuts it. costs: attention cost of each chunk.

    Sequences that run together and share blocks cannot be cut along their length: the first piece
    of one would need the last piece of another.
    """
    parts: list[Part] = []
    parts_of: list[list[int]] = []  # by chunk of the batch
    for first, last in sequence_ranges(costs, plan):
        members = batch.chunks[first:last]
        needed = {part for chunk in members for other in chunk.after if other < first
                  for part in parts_of[other]}  # fmt: skip
        together = any(other >= first for chunk in members for other in chunk.after)
        ends = plan.sequence_chunks if plan.sequence_chunks and not together else (1.0,)
        begun = len(parts)
        for pieces in _along_length(members, ends):
            previous = len(parts) - 1 if len(parts) > begun else None
            after = needed if previous is None else needed | {previous}
            parts.append(Part(pieces, frozenset(after), previous))
        parts_of += [list(range(begun, len(parts)))] * len(members)
    return parts


def _along_length(chunks: list[Chunk], ends: Sequence[float]) -> list[list[Chunk]]:
    """The pieces of all chunks up to each of `ends`, in order, without those that are empty. The
    first piece of a chunk makes its copies."""
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
    start, copies = chunk.start, () if first else chunk.copies
    return chunk._replace(start=start + first, stop=start + last, copies=copies)


class MicroBatch:
    """A slice of a batch's sequences on its way through the layers."""

    __slots__ = (
        "after",
        "attended",
        "batch",
        "chunks",
        "doing",
        "hidden_TD",
        "index",
        "inputs",
        "last",
        "layer",
        "pending",
        "previous",
        "ran_s",
        "sent_s",
        "shared_TD",
        "stage",
        "steps",
        "tokens",
        "x_TD",
    )

    def __init__(self, batch: BatchRun, index: int, chunks: list[Chunk]) -> None:
        self.batch = batch
        self.index = index
        self.chunks = chunks
        self.tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        self.inputs: AttentionBatch | None = None  # made in its first task
        self.last: LastRows | None = None  # what the last layer is computed for; None: all rows
        self.steps: Steps[None] | None = None  # of a task that has begun
        self.doing = Stage.ATTENTION, 0  # what it does, and at which layer
        self.ran_s = 0.0  # of that task
        self.sent_s = 0.0  # when its last rows went to the experts
        self.after: list[MicroBatch] = []  # whose blocks this one reads
        self.previous: MicroBatch | None = None  # the chunk before this one: it finishes first
        self.layer = 0
        self.stage = TaskStage.ATTENTION
        self.attended = -1  # the last layer whose K and V are in the pool
        self.hidden_TD: torch.Tensor | None = None
        self.x_TD: torch.Tensor | None = None
        self.shared_TD: torch.Tensor | None = None
        self.pending: Pending | None = None  # of the layer attended last

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
        """What it would run next, up to a yield. slice_s: for how long, predicted."""
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


class BatchRun:
    """A batch in flight. ran_s: of its tasks, so far."""

    __slots__ = ("begun_s", "micro_batches", "plan", "ran_s", "remaining", "scheduled")

    def __init__(self, scheduled: ScheduledBatch, plan: Plan, begun_s: float) -> None:
        self.begun_s = begun_s
        self.ran_s = 0.0
        self.scheduled = scheduled
        self.plan = plan
        self.micro_batches: list[MicroBatch] = []
        self.remaining = 0
