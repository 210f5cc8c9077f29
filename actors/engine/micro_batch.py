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
from contracts.plan import Plan
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
        "hidden_TD",
        "index",
        "inputs",
        "last",
        "layer",
        "pending",
        "previous",
        "shared_TD",
        "stage",
        "x_TD",
    )

    def __init__(
        self, batch: BatchRun, index: int, chunks: list[Chunk], inputs: AttentionBatch
    ) -> None:
        self.batch = batch
        self.index = index
        self.chunks = chunks
        self.inputs = inputs
        self.last: LastRows | None = None  # what the last layer is computed for; None: all rows
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
        if self.stage is TaskStage.FINISH:
            return self.previous is None or self.previous.layer < 0
        return all(other.attended >= self.layer for other in self.after)

    def task(self) -> Task:
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
        )


class BatchRun:
    """A batch in flight."""

    __slots__ = ("micro_batches", "plan", "remaining", "scheduled")

    def __init__(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        self.scheduled = scheduled
        self.plan = plan
        self.micro_batches: list[MicroBatch] = []
        self.remaining = 0
