"""Order of the tasks of attention ranks and of the queues of expert ranks, and preemption.

FinDEP (Section 4.2) fixes a static order; here it is a preference among runnable tasks, so that a
late message never idles the rank:

    ASAS        A(t,0) S(t,0) A(t,1) S(t,1) ...        micro-batch by micro-batch
    AASS        A(t,0) A(t,1) ... S(t,0) S(t,1) ...    all attention of a layer first
    ASAS lag 1  A(t,0) A(t,1) S(t,0) ... A(t,r1-1) S(t,r1-2) A(t+1,0) S(t,r1-1) A(t+1,1) ...
                                                       late shared experts, beyond the paper

NAIVE and PPPIPE have no S tasks of their own (the executor runs S inside A, before A2E).

`Preemption` chooses what a rank runs next, at every yield of a task:

    credit of BE > 0 ──> BE                            its share
    else LS ready    ──> LS                            by due time, then the plan's order
    else             ──> BE, unless an LS pass at the other group would be late: hold

QLLM (Section 4) preempts at layers and experts in one process; here an LS pass visits both groups
at every layer and would meet a whole BE task each time.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from contracts.plan import Order
from contracts.requests import Priority


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


def oldest_of_highest_class(heads: Sequence[QueueHead]) -> QueueHead:
    """Return the next head: LS first, then by missing experts, started calls, oldest arrival."""
    return min(heads, key=_turn)


def _turn(head: QueueHead) -> tuple[int, bool, bool, float]:
    return head.priority, head.missing > 0, not head.is_started, head.oldest_arrival_s


class TaskStage(enum.IntEnum):
    ATTENTION = 0
    SHARED = 1
    FINISH = 2


class Task(NamedTuple):
    """A runnable task up to its next yield.

    `batch` numbers grow with submission; `layer` of FINISH is L.
    """

    priority: int
    batch: int
    layer: int
    micro_batch: int
    stage: TaskStage
    order: Order
    shared_lag: int = 0
    micro_batches: int = 1  # of its batch; used with a lag only
    due_s: float = math.inf  # earliest due time in its batch
    is_started: bool = False  # suspended at a yield
    slice_s: float = 0.0  # predicted time to its next yield; 0: unknown


TaskPolicy = Callable[[Sequence[Task]], Task]


def position(task: Task) -> tuple[int, int, int, int]:
    """Return the plan's position of the task within its batch.

    The first number is the layer during which it runs: a late shared expert may run during the
    attention of the next layer.
    """
    if task.order is Order.AASS:
        return (task.layer, task.stage, task.micro_batch, 0)
    layers, slot = 0, task.micro_batch
    if task.stage is TaskStage.SHARED and task.shared_lag:
        layers, slot = divmod(task.micro_batch + task.shared_lag, task.micro_batches)
    return (task.layer + layers, slot, task.stage, task.micro_batch)


def by_plan(ready: Sequence[Task]) -> Task:
    """Return the next task: LS first, then by due time, batch, started, and the plan's order."""
    return min(ready, key=_by_plan)


def _by_plan(task: Task) -> tuple[float, ...]:
    return (task.priority, task.due_s, task.batch, not task.is_started, *position(task))


def by_layer(ready: Sequence[Task]) -> Task:
    """Return the next task for batches that share a layer's experts.

    LS first, then started tasks, then the batch furthest behind, so all reach a layer before any
    leaves it.
    """
    return min(
        ready, key=lambda task: (task.priority, not task.is_started, *position(task), task.batch)
    )


def static_order(
    order: Order, micro_batches: int, num_layers: int, shared_lag: int = 0
) -> list[Task]:
    """Return the A and S tasks of one batch in the order of `by_plan` without late messages.

    NAIVE and PPPIPE: S right after its A.
    """
    tasks = [
        Task(0, 0, layer, micro_batch, stage, order, shared_lag, micro_batches)
        for layer in range(num_layers)
        for micro_batch in range(micro_batches)
        for stage in (TaskStage.ATTENTION, TaskStage.SHARED)
    ]
    return sorted(tasks, key=position)


class PolicyFallbackError(Exception):
    """A user policy failed; the default decides."""


POLL_INTERVAL_S = 0.001  # between two looks for other work, each of some tens of us


class Work(Protocol):
    """Runnable work up to its next yield."""

    @property
    def priority(self) -> int: ...

    @property
    def is_started(self) -> bool:
        """True if it is suspended at a yield."""

    @property
    def slice_s(self) -> float:
        """Predicted seconds to its next yield; 0: unknown."""


W = TypeVar("W", bound=Work)


class Preemption(Generic[W]):
    """Preemption on one rank; owned by its loop. Times must not decrease.

    preempted: number of preemptions of a suspended BE task. held_s: time in which BE was held while
    nothing else was runnable.
    """

    def __init__(
        self,
        order: Callable[[Sequence[W]], W],
        *,
        be_share: float,
        choose: Callable[[Sequence[W]], W | None] | None = None,
        on_blocked: Callable[[float], None] = lambda seconds: None,
        on_resumed: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Create the policy.

        order: chooses among work of one class. choose: replaces all but the share; chooses among LS
        work and runnable BE work, and may raise PolicyFallbackError. on_blocked: called at each
        preemption with the seconds for which LS may have waited. on_resumed: called with the
        seconds for which BE was suspended.
        """
        self._order = order
        self._choose = choose
        self._floor = ShareCredit(be_share)
        self._be_waiting = self._be_ran_last = self._holding = False
        self._on_blocked, self._on_resumed = on_blocked, on_resumed
        self._be_began_s = self._preempted_s = 0.0
        self._since_s = 0.0  # time of the last accounting
        self.preempted = 0
        self.held_s = 0.0

    def pick(self, ready: Sequence[W], live: Iterable[LatencyPass], now_s: float) -> W | None:
        """Return one of `ready`, or None to hold; live: read only if BE might be held."""
        self._advance_to(now_s)
        self._be_waiting = False
        latency_sensitive = [work for work in ready if work.priority == Priority.LS]
        best_effort = [work for work in ready if work.priority != Priority.LS]
        best_effort = [work for work in best_effort if work.is_started] or best_effort
        first = self._order(best_effort) if best_effort else None
        if first is not None and self._floor.is_owed:
            return first
        chosen = self._chosen(latency_sensitive, best_effort, first, live, now_s)
        if first is not None and (chosen is None or chosen.priority == Priority.LS):
            self._be_waiting = True
            self._record_preemption(first, by=chosen, now_s=now_s)
        return chosen

    def _chosen(
        self,
        latency_sensitive: list[W],
        best_effort: list[W],
        first: W | None,
        live: Iterable[LatencyPass],
        now_s: float,
    ) -> W | None:
        if self._choose is not None and (latency_sensitive or best_effort):
            with contextlib.suppress(PolicyFallbackError):
                return self._choose([*latency_sensitive, *best_effort])
        if latency_sensitive:
            return self._order(latency_sensitive)
        if first is None or would_miss_due_time(live, first.slice_s, now_s):
            return None
        return first

    def _record_preemption(self, first: W, by: W | None, now_s: float) -> None:
        if by is None:
            self._holding = True
        elif first.is_started and self._be_ran_last:
            self._be_ran_last, self._preempted_s = False, now_s
            self.preempted += 1
            self._on_blocked(now_s - self._be_began_s)

    def ran(self, work: W, start_s: float, end_s: float) -> None:
        """Record a slice of the last pick."""
        if work.priority == Priority.LS:
            self._advance_to(end_s)
            return
        self._floor.charge(end_s - start_s)
        if work.is_started and not self._be_ran_last:
            self._on_resumed(start_s - self._preempted_s)
        self._be_began_s = start_s
        self._be_ran_last = True

    def charge(self, work: W, seconds: float) -> None:
        """Record that a slice took `seconds` longer than `ran` reported, if they are positive."""
        if work.priority != Priority.LS and seconds > 0.0:
            self._floor.charge(seconds)

    def forget(self) -> None:
        """Record that work was dropped: BE earns no credit before the next choice."""
        self._be_waiting = self._holding = False

    def _advance_to(self, now_s: float) -> None:
        """Account for time in which no BE work ran."""
        passed_s = now_s - self._since_s
        self._since_s = now_s
        if self._be_waiting:
            self._floor.add_wait(passed_s)
        if self._holding:
            self.held_s += passed_s
            self._holding = False


class ShareCredit:
    """Credit in seconds: -(1 - f) of the longest BE slice to f of the longest other one."""

    def __init__(self, share: float) -> None:
        """Create with share f, 0 <= f < 1."""
        self._share = share
        self.credit_s = 0.0

    @property
    def is_owed(self) -> bool:
        """True if BE goes first."""
        return self.credit_s > 0.0

    def add_wait(self, seconds: float) -> None:
        """Record that BE was ready and did not run."""
        self.credit_s += self._share * seconds

    def charge(self, seconds: float) -> None:
        """Record a BE slice. Free time costs at most this slice."""
        charge_s = (1.0 - self._share) * seconds
        self.credit_s = max(self.credit_s - charge_s, -charge_s)


class LatencyPass(NamedTuple):
    """A live LS batch: due time of its next token, and predicted time it still takes alone."""

    due_s: float
    remaining_s: float


def would_miss_due_time(passes: Iterable[LatencyPass], slice_s: float, now_s: float) -> bool:
    """Return whether a slice run now would make an LS pass late, or later.

    Due times decide, not classes: holding BE for every LS decode would halve its throughput for
    tokens that are in time. If LS is always late, it is ready nearly always, and BE has its share.
    """
    return any(now_s + slice_s + each.remaining_s > each.due_s for each in passes)


_NEWEST = 0.2  # weight of the latest time


class TaskTimes:
    """Moving averages of seconds by kind and tokens.

    Token counts within a factor of two share an entry.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        key = kind, tokens.bit_length()
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + _NEWEST * (seconds - known)

    def predict(self, kind: str, tokens: int) -> float:
        """Return the predicted seconds; 0 without a measurement."""
        return self._seconds.get((kind, tokens.bit_length()), 0.0)

    def forget(self, kind: str, tokens: int) -> None:
        self._seconds.pop((kind, tokens.bit_length()), None)
