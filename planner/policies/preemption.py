"""What a rank runs next, of both classes: chosen anew at every yield of a task.

    credit of BE > 0 ──> BE                            its share (share.py)
    else LS ready    ──> LS                            by due time, then the plan's order
    else             ──> BE, unless an LS pass that is with the other group would be late: hold

Both groups use it: over tasks of micro-batches on an attention rank or a prefill worker
(planner/findep/orders.py), over queue heads on an expert rank (planner/findep/expert_queues.py).
QLLM (Section 4) preempts at layers and experts in one process; here an LS pass visits both groups
at every layer, so that whole tasks of BE would meet it there each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from contracts.requests import Priority
from planner.policies.share import ShareFloor
from planner.policies.urgency import LivePass, would_be_late


class GaveWayError(Exception):
    """A choice of one's own failed: the default decides."""


LOOK_S = 0.001  # so often, between two steps, others are asked for: it takes some tens of us


class Work(Protocol):
    """What could run now, up to its next yield."""

    @property
    def priority(self) -> int: ...

    @property
    def begun(self) -> bool:
        """Whether it stands at a yield."""

    @property
    def slice_s(self) -> float:
        """Seconds to its next yield, predicted; 0: not known."""


W = TypeVar("W", bound=Work)


def _nobody(seconds: float) -> None:
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
        blocked: Callable[[float], None] = _nobody,
        parked: Callable[[float], None] = _nobody,
    ) -> None:
        """order: the choice among work of one class, never empty; of BE, what is begun comes
        first, so that there is one such task at most. choose: in place of all but the share: among
        LS work and that of BE which could go on; it may raise GaveWayError. Told in seconds, at
        each preemption:
        blocked, since when the step lasted that LS may have waited for; parked, once it is over,
        for how long BE stood."""
        self._order = order
        self._choose = choose
        self._floor = ShareFloor(be_share)
        self._be_waits = self._be_ran = self._holding = False
        self._blocked, self._parked = blocked, parked
        self._be_began_s = self._overtaken_s = 0.0
        self._since_s = 0.0  # until when the accounts are kept
        self.preempted = 0
        self.held_s = 0.0

    def pick(self, ready: Sequence[W], live: Iterable[LivePass], now_s: float) -> W | None:
        """One of `ready`; None: none, although some is. live: read only where BE might be held."""
        self._pass_time(now_s)
        self._be_waits = False
        mine = [work for work in ready if work.priority == Priority.LS]
        others = [work for work in ready if work.priority != Priority.LS]
        others = [work for work in others if work.begun] or others
        first = self._order(others) if others else None
        if first is not None and self._floor.is_owed:
            return first
        chosen = self._chosen(mine, others, first, live, now_s)
        if first is not None and (chosen is None or chosen.priority == Priority.LS):
            self._be_waits = True  # until the next choice
            self._note_overtaken(first, by=chosen, now_s=now_s)
        return chosen

    def _chosen(
        self,
        mine: list[W],
        others: list[W],
        first: W | None,
        live: Iterable[LivePass],
        now_s: float,
    ) -> W | None:
        if self._choose is not None and (mine or others):
            with contextlib.suppress(GaveWayError):
                return self._choose([*mine, *others])
        if mine:
            return self._order(mine)
        if first is None or would_be_late(live, first.slice_s, now_s):
            return None
        return first

    def _note_overtaken(self, first: W, by: W | None, now_s: float) -> None:
        if by is None:
            self._holding = True
        elif first.begun and self._be_ran:
            self._be_ran, self._overtaken_s = False, now_s
            self.preempted += 1
            self._blocked(now_s - self._be_began_s)

    def ran(self, work: W, start_s: float, end_s: float) -> None:
        """A slice of what was picked last."""
        if work.priority == Priority.LS:
            self._pass_time(end_s)
            return
        self._floor.served(end_s - start_s)
        if work.begun and not self._be_ran:
            self._parked(start_s - self._overtaken_s)
        self._be_began_s = start_s
        self._be_ran = True

    def forget(self) -> None:
        """Work was dropped. Whether BE still waits is seen at the next choice, which may be long
        after: until then it is owed nothing."""
        self._be_waits = self._holding = False

    def _pass_time(self, now_s: float) -> None:
        """Nothing of BE has run since the last time."""
        passed_s = now_s - self._since_s
        self._since_s = now_s
        if self._be_waits:
            self._floor.kept_waiting(passed_s)
        if self._holding:
            self.held_s += passed_s
            self._holding = False
