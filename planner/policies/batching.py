"""When a rank forms another batch while others run: a policy over what waits and what is live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from contracts.requests import Priority


class LiveBatch(NamedTuple):
    """A batch in flight. layers_left: of the micro-batch that is furthest behind."""

    priority: Priority
    tokens: int
    layers_left: int


class Waiting(NamedTuple):
    """Sequences of one class that have not begun, and their tokens."""

    sequences: int
    tokens: int


class BatchingView(Protocol):
    """What a policy may look at. Each is worked out when it is asked for."""

    @property
    def in_flight(self) -> int:
        """How many are `live`: asked after every task."""

    @property
    def live(self) -> Sequence[LiveBatch]: ...

    @property
    def layers(self) -> int:
        """Of the model."""

    @property
    def free_blocks(self) -> int: ...

    def waiting(self, priority: Priority) -> Waiting: ...


BatchingPolicy = Callable[[BatchingView], bool]
"""Whether to form another batch now. What it holds is the scheduler's choice."""


def one_at_a_time(view: BatchingView) -> bool:
    """The batch runs alone: whoever comes meanwhile is in the next one."""
    return view.in_flight == 0


def joining(*, most: int, within_layers: int) -> BatchingPolicy:
    """Up to `most` batches, another one only while none has gone through more than `within_layers`:
    it then catches up, and all wait for one copy of each layer's experts."""

    def policy(view: BatchingView) -> bool:
        if view.in_flight == 0 or view.in_flight >= most:
            return view.in_flight == 0
        furthest = view.layers - min(batch.layers_left for batch in view.live)
        return furthest <= within_layers

    return policy
