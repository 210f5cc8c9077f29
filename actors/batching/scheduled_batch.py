"""A batch as the scheduler hands it out: which new tokens of which sequences run together."""

from __future__ import annotations

import math
from typing import NamedTuple

from actors.batching.sequence import Sequence
from contracts.requests import Priority
from models.decoder.batch import BlockCopy, SequenceSlice
from planner.scheduling.batching import Phase


class Chunk(NamedTuple):
    """New tokens [start, stop) of one sequence. `after`: earlier chunks of this batch whose blocks
    it shares. `copies`: what it takes over of the block that `start` lies in."""

    sequence: Sequence
    start: int
    stop: int
    after: frozenset[int]
    copies: tuple[BlockCopy, ...] = ()


class ScheduledBatch(NamedTuple):
    """sources: blocks to which it holds a reference of its own, because chunks copy from them.
    due_s: when the next token of any of its sequences is due. phase: of all; None: of either."""

    number: int
    priority: Priority
    chunks: list[Chunk]
    sources: tuple[int, ...] = ()
    due_s: float = math.inf
    phase: Phase | None = None

    @property
    def tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def slice_of(chunk: Chunk) -> SequenceSlice:
    """A chunk as the model takes it."""
    sequence = chunk.sequence
    new = sequence.token_ids[chunk.start : chunk.stop]
    return SequenceSlice(new, chunk.start, sequence.block_table, chunk.copies)
