"""When a rank forms another batch while others run, and of what: a policy over what waits and what
is live."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from contracts.requests import Priority

BEST_EFFORT_STARTS: Final = 32  # prompts; to begin one takes about 75 us, in which LS waits


class Phase(enum.IntEnum):
    """Of a sequence: whether more than one of its tokens is still to be computed."""

    PREFILL = 0
    DECODE = 1


class Form(NamedTuple):
    """What a batch is made of: sequences of these classes, the first one's before the others', in
    that phase (None: any). starts: at most so many begin of those that wait in a class (None: as
    many as fit). keys: of those sequences, in that order (None: of all)."""

    priorities: tuple[Priority, ...] = tuple(Priority)
    phase: Phase | None = None
    starts: int | None = None
    keys: tuple[Hashable, ...] | None = None


class LiveBatch(NamedTuple):
    """A batch in flight. layers_left: of the micro-batch that is furthest behind. phase: None where
    it has sequences of both. ran_s: of its tasks so far; age_s: since it began; left_s: that it
    would still take alone, as predicted."""

    priority: Priority
    tokens: int
    layers_left: int
    number: int = 0
    phase: Phase | None = None
    ran_s: float = 0.0
    age_s: float = 0.0
    left_s: float = 0.0


class SequenceView(NamedTuple):
    """A sequence that could be in the next batch. blocks: that it holds. due_s, arrived_s: on the
    rank's clock; BE is never due (inf). tenant: of its API key, without telling that."""

    key: Hashable
    priority: Priority
    phase: Phase
    uncomputed_tokens: int
    blocks: int
    due_s: float
    arrived_s: float
    tenant: bytes


class WaitingWork(NamedTuple):
    """Sequences of one class that have not begun, and their tokens."""

    sequences: int
    tokens: int


class BatchingView(Protocol):
    """What a policy may look at. Each is worked out when it is asked for."""

    @property
    def in_flight(self) -> int:
        """How many are `live`."""

    @property
    def live(self) -> Sequence[LiveBatch]: ...

    @property
    def layers(self) -> int:
        """Of the model."""

    @property
    def free_blocks(self) -> int: ...

    @property
    def running(self) -> int:
        """Sequences that have begun, in a batch or not."""

    @property
    def idle(self) -> Sequence[SequenceView]:
        """Those that are in no batch."""

    def count(self, priority: Priority) -> int:
        """Sequences of that class, whatever they do."""

    def waiting(self, priority: Priority) -> WaitingWork: ...


BatchingPolicy = Callable[[BatchingView], Iterable[Form]]
"""What to form now, the first of these of which there is something. It is asked again after a batch
was formed, and when anything has come, gone or ended."""

ALL = Form()
LS_DECODES = Form((Priority.LS,), Phase.DECODE)
ALL_DECODES = Form((Priority.LS, Priority.BE), Phase.DECODE)
LS_PROMPTS = Form((Priority.LS,), Phase.PREFILL)
BE_BATCH = Form((Priority.BE,), starts=BEST_EFFORT_STARTS)
SEPARATE_BATCHES = (
    ALL_DECODES,
    LS_PROMPTS,
    Form((Priority.BE,), Phase.PREFILL, BEST_EFFORT_STARTS),
)
"""The batches that are live at once while both classes are there, as `coalesce_decodes` likes them
best."""


def one_at_a_time(view: BatchingView) -> Iterable[Form]:
    """The batch runs alone: whoever comes meanwhile is in the next one. A batch is an iteration
    (Orca), LS before BE in it."""
    return (ALL,) if view.in_flight == 0 else ()


def joining(*, most: int, within_layers: int) -> BatchingPolicy:
    """Up to `most` batches, another one only while none has gone through more than `within_layers`:
    it then catches up, and all wait for one copy of each layer's experts."""

    def policy(view: BatchingView) -> Iterable[Form]:
        if view.in_flight == 0:
            return (ALL,)
        if view.in_flight >= most:
            return ()
        furthest = view.layers - min(batch.layers_left for batch in view.live)
        return (ALL,) if furthest <= within_layers else ()

    return policy


def by_class(view: BatchingView) -> Iterable[Form]:
    """While both classes are there a batch is of one of them: one of LS decodes, one of LS prompts
    and one of BE are live at once, and which of their tasks runs is chosen at every yield (QLLM,
    Section 3). While there is one class only nothing would go first: one at a time, mixed, since
    then each expert's weights are read once.

    BE's batch is of both phases all the same: no time is due in it. Nothing goes first while it is
    formed, so few prompts begin in one.
    """
    if not (view.count(Priority.LS) and view.count(Priority.BE)):
        return one_at_a_time(view)
    live = [(batch.priority, batch.phase) for batch in view.live]
    forms = [
        Form((Priority.LS,), phase)
        for phase in (Phase.DECODE, Phase.PREFILL)
        if (Priority.LS, phase) not in live and (Priority.LS, None) not in live
    ]
    if all(priority is not Priority.BE for priority, _ in live):
        forms.append(BE_BATCH)
    return forms


def coalesce_decodes(left_s: Callable[[], float], places: Callable[[], int]) -> BatchingPolicy:
    """`by_class`, but while BE runs LS decodes are not formed before their due times want it; and
    they are filled up with BE's (QLLM, Algorithm 1, lines 10 to 14), so that each expert's weights
    are read once for both. BE's own batch then leaves its decodes to the next one of LS.

    left_s: for how long LS decodes that are idle can still wait; inf: there are none. places: how
    many more sequences may begin while BE's decodes are in LS's batch; negative: they cannot be.
    """

    def policy(view: BatchingView) -> Iterable[Form]:
        forms, wait_s = by_class(view), left_s()
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
    """`by_class` where layers' experts are copied, one after the other: LS overtakes a BE pass only
    if what that still takes is more than the copies lost (the layer that was on its way when LS
    began, and when BE goes on) and those that a pass of few LS tokens does not hide. Meanwhile BE
    has had its share of its pass.

    copy_s: of one layer, as measured.
    """

    def policy(view: BatchingView) -> Iterable[Form]:
        if not (view.count(Priority.LS) and view.count(Priority.BE)) or view.in_flight == 0:
            return one_at_a_time(view)
        if any(batch.priority is Priority.LS for batch in view.live):
            return ()
        best_effort_batch = view.live[0]
        copy_cost_s = (2 + view.layers) * copy_s()
        is_profitable = (
            best_effort_batch.left_s > copy_cost_s
            and best_effort_batch.ran_s >= be_share * best_effort_batch.age_s
        )
        return (Form((Priority.LS,)),) if is_profitable else ()

    return policy
