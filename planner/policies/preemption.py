"""What a rank runs next, of both classes: picked at every yield of a task.

Both groups use it: over tasks of micro-batches on an attention rank or a prefill worker
(planner/findep/orders.py), over queue heads on an expert rank (planner/findep/expert_queues.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from contracts.requests import Priority


class Work(Protocol):
    """What could run now, up to its next yield."""

    @property
    def priority(self) -> int: ...

    @property
    def begun(self) -> bool: ...

    @property
    def slice_s(self) -> float:
        """Seconds to its next yield, predicted; 0: not known."""


W = TypeVar("W", bound=Work)


class LivePass(NamedTuple):
    """A live LS batch: when its next token is due, and for how long it would still take if it ran
    alone, as predicted (both groups, the way there and back)."""

    due_s: float
    left_s: float


class Preemption(Generic[W]):
    """Owned by the rank's loop. Times are given."""

    def __init__(self, order: Callable[[Sequence[W]], W], *, be_share: float) -> None:
        """order: the choice among work of one class, never empty."""
        self._order = order
        self._be_share = be_share

    def pick(self, ready: Sequence[W], live: Sequence[LivePass], now_s: float) -> W | None:
        """One of `ready`; None: none, although some is (BE is held back for an LS due time)."""
        first = min((work.priority for work in ready), default=Priority.BE)
        return self._order([work for work in ready if work.priority == first]) if ready else None

    def ran(self, work: W, start_s: float, end_s: float) -> None:
        """A slice of it, the one picked last."""
