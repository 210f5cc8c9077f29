"""What a rank runs next, of both classes: chosen anew at every yield of a task.

    credit of BE > 0 ──> BE                            its share (share.py)
    else LS ready    ──> LS                            by due time, then the plan's order
    else             ──> BE, unless an LS pass that is with the other group would be late: hold

Both groups use it: over tasks of micro-batches on an attention rank or a prefill worker
(planner/scheduling/task_order.py), over queue heads on an expert rank
(planner/scheduling/expert_queues.py).
QLLM (Section 4) preempts at layers and experts in one process; here an LS pass visits both groups
at every layer, so that whole tasks of BE would meet it there each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from contracts.requests import Priority


class PolicyFallbackError(Exception):
    """A choice of one's own failed: the default decides."""


POLL_INTERVAL_S = (
    0.001  # so often, between two steps, others are asked for: it takes some tens of us
)


class Work(Protocol):
    """What could run now, up to its next yield."""

    @property
    def priority(self) -> int: ...

    @property
    def is_started(self) -> bool:
        """Whether it stands at a yield."""

    @property
    def slice_s(self) -> float:
        """Seconds to its next yield, predicted; 0: not known."""


W = TypeVar("W", bound=Work)


def _ignore(seconds: float) -> None:
    """Nobody asks."""


class Preemption(Generic[W]):
    """Owned by the rank's loop. Times are given, in order.

    preempted: how often LS work ran while a BE task stood at a yield. held_s: for how long BE was
    held back while nothing else was there to run.
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
        """order: the choice among work of one class, never empty; of BE, what is begun comes
        first, so that there is one such task at most. choose: in place of all but the share: among
        LS work and that of BE which could go on; it may raise PolicyFallbackError. Told in seconds,
        at each preemption:
        blocked, since when the step lasted that LS may have waited for; parked, once it is over,
        for how long BE stood."""
        self._order = order
        self._choose = choose
        self._floor = ShareCredit(be_share)
        self._be_waiting = self._be_ran_last = self._holding = False
        self._on_blocked, self._on_resumed = on_blocked, on_resumed
        self._be_began_s = self._preempted_s = 0.0
        self._since_s = 0.0  # until when the accounts are kept
        self.preempted = 0
        self.held_s = 0.0

    def pick(self, ready: Sequence[W], live: Iterable[LatencyPass], now_s: float) -> W | None:
        """One of `ready`; None: none, although some is. live: read only where BE might be held."""
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
            self._be_waiting = True  # until the next choice
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
        """A slice of what was picked last."""
        if work.priority == Priority.LS:
            self._advance_to(end_s)
            return
        self._floor.charge(end_s - start_s)
        if work.is_started and not self._be_ran_last:
            self._on_resumed(start_s - self._preempted_s)
        self._be_began_s = start_s
        self._be_ran_last = True

    def forget(self) -> None:
        """Work was dropped. Whether BE still waits is seen at the next choice, which may be long
        after: until then it is owed nothing."""
        self._be_waiting = self._holding = False

    def _advance_to(self, now_s: float) -> None:
        """Nothing of BE has run since the last time."""
        passed_s = now_s - self._since_s
        self._since_s = now_s
        if self._be_waiting:
            self._floor.add_wait(passed_s)
        if self._holding:
            self.held_s += passed_s
            self._holding = False


class ShareCredit:
    """Credit in seconds. It lies between -(1 - f) of the longest BE slice and f of what else the
    rank does at a time."""

    def __init__(self, share: float) -> None:
        """share: f, 0 <= f < 1; 0: BE has no claim."""
        self._share = share
        self.credit_s = 0.0

    @property
    def is_owed(self) -> bool:
        """Whether BE goes first."""
        return self.credit_s > 0.0

    def add_wait(self, seconds: float) -> None:
        """BE was ready for so long, and did not run."""
        self.credit_s += self._share * seconds

    def charge(self, seconds: float) -> None:
        """A BE slice ran. What it had for nothing, while nobody else wanted the rank, is not held
        against it beyond that slice."""
        charge_s = (1.0 - self._share) * seconds
        self.credit_s = max(self.credit_s - charge_s, -charge_s)


class LatencyPass(NamedTuple):
    """A live LS batch: when its next token is due, and for how long it would still take if it ran
    alone, as predicted (both groups, the way there and back)."""

    due_s: float
    left_s: float


def would_miss_due_time(passes: Iterable[LatencyPass], slice_s: float, now_s: float) -> bool:
    """Whether a slice of `slice_s` seconds, run now, would cost an LS pass its due time, or make
    one later that has lost it.

    Due times decide, not classes: to hold BE for every LS decode costs half of its throughput, for
    tokens that would have been in time. Where LS is hopelessly late there is too much of it: then
    it is ready nearly always, and BE has what its share gives.
    """
    return any(now_s + slice_s + each.left_s > each.due_s for each in passes)
