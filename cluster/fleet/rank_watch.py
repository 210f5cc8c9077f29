"""Asks a rank for its status again and again, and says when it must be given up."""

from __future__ import annotations

from concurrent.futures import Future

from actors.ranks.rendezvous import WorkerHandle
from contracts.worker import RankStatus

CHECK_PERIOD_S = 0.25
HUNG_AFTER_S = 3.0  # without an answer to `status`, which nothing that the rank does holds up


class RankWatch:
    """`look` every CHECK_PERIOD_S or so, from one thread. problem: why the rank is of no use, as
    far as is known; empty: it is of use."""

    def __init__(self, rank: WorkerHandle) -> None:
        self.problem = ""
        self._rank = rank
        self._asked: Future[RankStatus] | None = None
        self._asked_s = 0.0

    def look(self, now_s: float, stalled_s: float) -> str:
        """The problem. stalled_s: how long the caller itself stood still since the last look."""
        if self._asked is None:
            self._asked, self._asked_s = self._rank.call("status"), now_s
        elif not self._asked.done():
            self._asked_s += stalled_s
            silent_s = now_s - self._asked_s
            if silent_s > HUNG_AFTER_S:
                self.problem = f"no answer for {silent_s:.1f} s"
        else:
            asked, self._asked = self._asked, None
            self.problem = _problem(asked)
        return self.problem


def _problem(asked: Future[RankStatus]) -> str:
    error = asked.exception()
    if error is not None:
        return str(error) or type(error).__name__
    status = asked.result()
    return "" if status.healthy else status.reason or "not healthy"
