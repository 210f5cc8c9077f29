"""Which queue an expert rank serves next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class QueueHead(NamedTuple):
    """A non-empty queue of token groups of one class at one layer; or a call of that class that
    stands at a yield (`is_started`). missing: experts that it needs and that are still to be read.
    number: of what has begun. generation: of the placement that they came with."""

    priority: int
    layer: int
    oldest_arrival_s: float
    groups: int
    tokens: int = 0
    is_started: bool = False
    slice_s: float = 0.0  # to its next yield, predicted; 0: not known
    missing: int = 0
    number: int = 0
    generation: int = 0


ExpertQueuePolicy = Callable[[Sequence[QueueHead]], QueueHead]


def oldest_of_highest_class(heads: Sequence[QueueHead]) -> QueueHead:
    """LS before BE; within a class, what misses no expert, then what has begun, then the queue that
    has waited longest."""
    return min(heads, key=_turn)


def _turn(head: QueueHead) -> tuple[int, bool, bool, float]:
    return head.priority, head.missing > 0, not head.is_started, head.oldest_arrival_s
