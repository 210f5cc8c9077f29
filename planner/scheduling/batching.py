"""Policies for when a rank forms another batch while others run, and what it contains."""

import enum
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from contracts.requests import Priority

BEST_EFFORT_STARTS: Final = 32  # prompts; LS waits about 75 us for the start of each


class Phase(enum.IntEnum):
    """Phase of a sequence: more than one token to compute, or one."""

    PREFILL = 0
    DECODE = 1


class BatchSelection(NamedTuple):
    """Specification of a batch.

    priorities: classes in order of preference. phase: None: any. starts: the most waiting sequences
    of a class that start (None: as many as fit). keys: the sequences to take, in order (None: all).
    """

    priorities: tuple[Priority, ...] = tuple(Priority)
    phase: Phase | None = None
    starts: int | None = None
    keys: tuple[Hashable, ...] | None = None


class LiveBatch(NamedTuple):
    """A batch in flight.

    layers_left: of the slowest micro-batch. phase: None for both. ran_s: time of its tasks so far.
    age_s: since its start. remaining_s: predicted time that it would still take alone.
    """

    priority: Priority
    tokens: int
    layers_left: int
    number: int = 0
    phase: Phase | None = None
    ran_s: float = 0.0
    age_s: float = 0.0
    remaining_s: float = 0.0


class SequenceView(NamedTuple):
    """A sequence for the next batch.

    blocks: that it holds. due_s, arrived_s: on the rank's clock; BE is never due (inf). tenant: an
    opaque id of its API key.
    """

    key: Hashable
    priority: Priority
    phase: Phase
    uncomputed_tokens: int
    blocks: int
    due_s: float
    arrived_s: float
    tenant: bytes


class WaitingWork(NamedTuple):
    """Sequences of one class that have not started, and their tokens."""

    sequences: int
    tokens: int


class BatchingView(Protocol):
    """The view of a batching policy; properties are computed on access."""

    @property
    def in_flight(self) -> int:
        """Number of `live` batches."""

    @property
    def live(self) -> Sequence[LiveBatch]: ...

    @property
    def layers(self) -> int:
        """Number of the model's layers."""

    @property
    def free_blocks(self) -> int: ...

    @property
    def running(self) -> int:
        """Sequences that have started, in a batch or not."""

    @property
    def idle(self) -> Sequence[SequenceView]:
        """Sequences in no batch."""

    def count(self, priority: Priority) -> int:
        """Return the number of sequences of that class."""

    def waiting(self, priority: Priority) -> WaitingWork: ...


BatchingPolicy = Callable[[BatchingView], Iterable[BatchSelection]]

"""Returns specifications in order of preference; the first that matches any sequence is formed.

Called again after a batch was formed, and when a request arrived or ended.
"""

ALL = BatchSelection()
LS_DECODES = BatchSelection((Priority.LS,), Phase.DECODE)
ALL_DECODES = BatchSelection((Priority.LS, Priority.BE), Phase.DECODE)
LS_PROMPTS = BatchSelection((Priority.LS,), Phase.PREFILL)
BE_BATCH = BatchSelection((Priority.BE,), starts=BEST_EFFORT_STARTS)
SEPARATE_BATCHES = (
    ALL_DECODES,
    LS_PROMPTS,
    BatchSelection((Priority.BE,), Phase.PREFILL, BEST_EFFORT_STARTS),
)

"""The preferred live batches of `coalesce_decodes` with both classes present."""


def one_at_a_time(view: BatchingView) -> Iterable[BatchSelection]:
    """Form a batch only if none runs: an iteration (Orca), LS before BE in it."""
    return (ALL,) if view.in_flight == 0 else ()


def joining(*, most: int, within_layers: int) -> BatchingPolicy:
    """Form up to `most` batches, another one while none has passed `within_layers` layers.

    It then catches up, and all share one copy of each layer's experts.
    """

    def policy(view: BatchingView) -> Iterable[BatchSelection]:
        if view.in_flight == 0:
            return (ALL,)
        if view.in_flight >= most:
            return ()
        furthest = view.layers - min(batch.layers_left for batch in view.live)
        return (ALL,) if furthest <= within_layers else ()

    return policy


def by_class(view: BatchingView) -> Iterable[BatchSelection]:
    """Form one batch each of LS decodes, LS prompts and BE while both classes are present.

    The task that runs is chosen at every yield (QLLM, Section 3). With one class, one mixed batch
    at a time, so each expert's weights are read once. BE's batch has both phases, because none of
    its tokens is due; few prompts start in it, because forming it is not preempted.
    """
    if not (view.count(Priority.LS) and view.count(Priority.BE)):
        return one_at_a_time(view)
    live = [(batch.priority, batch.phase) for batch in view.live]
    forms = [
        BatchSelection((Priority.LS,), phase)
        for phase in (Phase.DECODE, Phase.PREFILL)
        if (Priority.LS, phase) not in live and (Priority.LS, None) not in live
    ]
    if all(priority is not Priority.BE for priority, _ in live):
        forms.append(BE_BATCH)
    return forms


def coalesce_decodes(remaining_s: Callable[[], float], places: Callable[[], int]) -> BatchingPolicy:
    """Return `by_class` with delayed LS decodes that are filled with BE decodes.

    While BE runs, LS decodes wait until their due time requires a batch, which is filled with BE
    decodes (QLLM, Algorithm 1, lines 10 to 14): each expert's weights are read once for both. BE's
    own batch then leaves its decodes to the next LS batch.

    remaining_s: time for which idle LS decodes can still wait; inf without any. places: sequences
    that may still start while BE decodes are in LS's batch; negative: no filling.
    """

    def policy(view: BatchingView) -> Iterable[BatchSelection]:
        forms, wait_s = by_class(view), remaining_s()
        if not (view.count(Priority.LS) and view.count(Priority.BE)):
            return forms
        live = [(batch.priority, batch.phase) for batch in view.live]
        if wait_s > 0 and any(priority is Priority.BE for priority, _ in live):
            forms = [form for form in forms if form != LS_DECODES]
        idle = wait_s < math.inf
        if not (idle or (Priority.LS, Phase.DECODE) in live) or (more := places()) < 0:
            return forms
        filled = {LS_DECODES: ALL_DECODES} if idle else {}
        filled[BE_BATCH] = BE_BATCH._replace(
            phase=Phase.PREFILL, starts=min(more, BEST_EFFORT_STARTS)
        )
        return [filled.get(form, form) for form in forms]

    return policy


def preempt_if_profitable(copy_s: Callable[[], float], be_share: float) -> BatchingPolicy:
    """Return `by_class` for layers whose experts are copied one after the other.

    LS preempts a BE pass only if its remaining time exceeds the lost copies (the layers in progress
    when LS starts and when BE resumes) and the copies that a short LS pass does not hide, and BE
    has had its share of its pass. copy_s: of one layer, measured.
    """

    def policy(view: BatchingView) -> Iterable[BatchSelection]:
        if not (view.count(Priority.LS) and view.count(Priority.BE)) or view.in_flight == 0:
            return one_at_a_time(view)
        if any(batch.priority is Priority.LS for batch in view.live):
            return ()
        best_effort_batch = view.live[0]
        copy_cost_s = (2 + view.layers) * copy_s()
        is_profitable = (
            best_effort_batch.remaining_s > copy_cost_s
            and best_effort_batch.ran_s >= be_share * best_effort_batch.age_s
        )
        return (BatchSelection((Priority.LS,)),) if is_profitable else ()

    return policy
