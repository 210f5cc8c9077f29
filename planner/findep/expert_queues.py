"""Which queue an expert rank serves next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class QueueHead(NamedTuple):
    """A non-empty queue of token groups of one class at one layer."""

    priority: int
    layer: int
    oldest_arrival_s: float
    groups: int


QueuePolicy = Callable[[Sequence[QueueHead]], QueueHead]


def oldest_of_best_class(heads: Sequence[QueueHead]) -> QueueHead:
    """LS before BE; within a class, the queue that has waited longest."""
    return min(heads, key=lambda head: (head.priority, head.oldest_arrival_s))
