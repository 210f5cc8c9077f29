"""A scheduled batch: which new tokens of which sequences run together."""

from __future__ import annotations

import math
from typing import NamedTuple

from actors.batching.sequence import Sequence
from contracts.requests import Priority
from models.decoder.batch import BlockCopy, SequenceSlice
from planner.scheduling.batching import Phase


class Chunk(NamedTuple):
    """New tokens [start, stop) of a sequence. after: chunks whose blocks it shares."""

    sequence: Sequence
    start: int
    stop: int
    after: frozenset[int]
    copies: tuple[BlockCopy, ...] = ()


class ScheduledBatch(NamedTuple):
    """Chunks that run together.

    sources: blocks with a reference of the batch's own, because chunks copy from them. due_s:
    earliest due time of a next token. phase: of all chunks; None: mixed.
    """

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
    """Return a chunk in the model's form."""
    sequence = chunk.sequence
    new = sequence.token_ids[chunk.start : chunk.stop]
    return SequenceSlice(new, chunk.start, sequence.block_table, chunk.copies)
