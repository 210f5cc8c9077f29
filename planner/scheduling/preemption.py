"""Choice of what a rank runs next, at every yield of a task.

    credit of BE > 0 ──> BE                            its share
    else LS ready    ──> LS                            by due time, then the plan's order
    else             ──> BE, unless an LS pass at the other group would be late: hold

Used for tasks of micro-batches on attention ranks and prefill workers
(planner/scheduling/task_order.py), and for queue heads on expert ranks
(planner/scheduling/task_order.py). QLLM (Section 4) preempts at layers and experts in one process;
here an LS pass visits both groups at every layer and would meet a whole BE task each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from contracts.requests import Priority


class PolicyFallbackError(Exception):
    """A user policy failed; the default decides."""


POLL_INTERVAL_S = (
    0.001  # so often, between two steps, others are asked for: it takes some tens of us
)


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


def _ignore(seconds: float) -> None:
    """Ignore a notification."""


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
        on_blocked: Callable[[float], None] = _ignore,
        on_resumed: Callable[[float], None] = _ignore,
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
