"""A batch in flight on an attention rank, and the micro-batches it is cut into.

Each micro-batch is a small state machine (actors/executor.py draws it): `stage` and `layer` say
what it would run next, `pending` and `after` what it still waits for.
"""

from __future__ import annotations

import torch

from actors.channels.base import Packet
from actors.dispatch import RankSlice
from actors.scheduler import Chunk, ScheduledBatch
from contracts.plan import Plan
from models.batch import AttentionBatch
from planner.orders import Task, TaskStage


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
        "layer",
        "pending",
        "replies",
        "shared_TD",
        "slices",
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
        self.after: list[MicroBatch] = []  # whose blocks this one shares
        self.layer = 0
        self.stage = TaskStage.ATTENTION
        self.attended = -1  # the last layer whose K and V are in the pool
        self.hidden_TD: torch.Tensor | None = None
        self.x_TD: torch.Tensor | None = None
        self.shared_TD: torch.Tensor | None = None
        self.slices: list[RankSlice] = []
        self.replies: dict[tuple[int, int], Packet] = {}  # by (token group, expert rank)
        self.pending = 0  # replies that have not arrived

    @property
    def is_ready(self) -> bool:
        if self.stage is TaskStage.SHARED:
            return True
        if self.stage is TaskStage.FINISH:
            return self.pending == 0
        return self.pending == 0 and all(other.attended >= self.layer for other in self.after)

    def task(self) -> Task:
        run = self.batch
        return Task(
            run.scheduled.priority,
            run.scheduled.number,
            self.layer,
            self.index,
            self.stage,
            run.plan.order,
        )


class BatchRun:
    """A batch in flight."""

    __slots__ = ("micro_batches", "plan", "remaining", "scheduled")

    def __init__(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        self.scheduled = scheduled
        self.plan = plan
        self.micro_batches: list[MicroBatch] = []
        self.remaining = 0
