"""Choice of the queue that an expert rank serves next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class QueueHead(NamedTuple):
    """A queue of token groups of one class at one layer, or a started call at a yield.

    missing: needed experts that are not loaded. number: of the started call. generation: of the
    placement of the groups.
    """

    priority: int
    layer: int
    oldest_arrival_s: float
    groups: int
    tokens: int = 0
    is_started: bool = False
    slice_s: float = 0.0  # predicted time to its next yield; 0: unknown
    missing: int = 0
    number: int = 0
    generation: int = 0


ExpertQueuePolicy = Callable[[Sequence[QueueHead]], QueueHead]


def oldest_of_highest_class(heads: Sequence[QueueHead]) -> QueueHead:
    """Return the next head: LS first, then by missing experts, started calls, oldest arrival."""
    return min(heads, key=_turn)


def _turn(head: QueueHead) -> tuple[int, bool, bool, float]:
    return head.priority, head.missing > 0, not head.is_started, head.oldest_arrival_s
