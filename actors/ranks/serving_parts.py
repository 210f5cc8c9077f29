"""What a serving loop is made of: where sequences come from, the executor, and what it has made
(actors/ranks/serving_loop.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from actors.batching.admission import Admission
from actors.batching.observer import Observer
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence as TokenSequence
from actors.channels.loop_watch import LoopWatch
from actors.wire.client_server import ClientServer
from contracts.errors import ChannelError
from contracts.messages import Event
from contracts.plan import Plan
from planner.policies.batching import BatchingPolicy, LiveBatch, one_at_a_time


class BatchExecutor(Protocol):
    """What runs batches. `failure`: why it can run none any more, if so."""

    failure: ChannelError | None
    layers: int

    @property
    def is_engaged(self) -> bool:
        """Whether no batch may begin now, whatever is in flight."""

    @property
    def in_flight(self) -> int: ...

    @property
    def live(self) -> Sequence[LiveBatch]:
        """The batches in flight."""

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None: ...

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Runs one task, or waits for something to do. Returns the batches it completed."""

    def drop(self, number: int) -> ScheduledBatch | None:
        """Forgets that batch; None: there is none."""

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops everything in flight; returns what was dropped."""

    def wake(self) -> None:
        """Ends a `step` that waits. Called from any thread."""


class Answers(Protocol):
    """What the executor's sink has made since it was last emptied."""

    answers: list[tuple[TokenSequence, Event]]


class Intake(NamedTuple):
    """Where sequences come from, and which are taken."""

    clients: ClientServer
    admission: Admission
    block_tokens: int


class ServingParts(NamedTuple):
    """What a serving loop is made of. plan_of: the plan of a batch that has been formed. close:
    ends threads and links of the executor's plane and of the observers; may be called twice."""

    scheduler: Scheduler
    executor: BatchExecutor
    finisher: Answers
    watch: LoopWatch
    plan_of: Callable[[ScheduledBatch], Plan]
    close: Callable[[], None]
    observers: Sequence[Observer] = ()
    batching: BatchingPolicy = one_at_a_time
