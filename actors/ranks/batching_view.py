"""What a batching policy sees of a rank (planner/policies/batching.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence as TokenSequence
from actors.ranks.serving_parts import BatchExecutor
from contracts.requests import Priority
from planner.policies.batching import LiveBatch, SequenceView, Waiting


class View(NamedTuple):
    """A `BatchingView`."""

    scheduler: Scheduler
    executor: BatchExecutor

    @property
    def in_flight(self) -> int:
        return self.executor.in_flight

    @property
    def live(self) -> Sequence[LiveBatch]:
        return self.executor.live

    @property
    def layers(self) -> int:
        return self.executor.layers

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.available

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def idle(self) -> Sequence[SequenceView]:
        return [view_of(s) for s in self.scheduler.sequences if not s.in_flight and not s.done]

    def count(self, priority: Priority) -> int:
        return self.scheduler.count(priority)

    def waiting(self, priority: Priority) -> Waiting:
        return self.scheduler.waiting_of(priority)


def view_of(sequence: TokenSequence) -> SequenceView:
    return SequenceView(
        sequence.key,
        sequence.priority,
        sequence.phase,
        sequence.num_uncomputed,
        len(sequence.block_table),
        sequence.due_s,
        sequence.arrived_s,
        sequence.owner.tenant,
    )
