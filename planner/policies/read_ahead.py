"""Whether to begin to read an expert that may be wanted, and whether to guess at all."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

TRIED: Final = 12  # passes of a trial
KEPT: Final = 240  # passes between two trials
_OUTLIERS: Final = 6  # one pass in so many, the longest, is not looked at


class Trial:
    """Whether looking ahead costs less than it saves, found out by doing both: passes go the way
    that cost less of late, and in one of twenty the other way. No estimate of what a guess costs
    and what it hides holds on every machine; both together are measured."""

    def __init__(self) -> None:
        self.is_on = True
        self._costs = {way: deque[float](maxlen=2 * TRIED) for way in (True, False)}
        self._is_trial, self._left, self._is_first = True, 2 * TRIED, True

    def passed(self, cost_s: float) -> None:
        """A pass has ended: the seconds in which it waited for experts, and spent on guesses."""
        if not self._is_first:  # a first one finds what the other way has left
            self._costs[self.is_on].append(cost_s)
        self._is_first = False
        self._left -= 1
        if self._left == 0:
            self._turn()

    def _turn(self) -> None:
        """At the end of a trial the better way is kept for a while; then the other one is tried."""
        before = self.is_on
        if self._is_trial and all(self._costs.values()):
            self.is_on = _usual(self._costs[True]) <= _usual(self._costs[False])
            self._is_trial, self._left = False, KEPT
        else:
            self.is_on, self._is_trial, self._left = not self.is_on, True, TRIED
        self._is_first = self.is_on != before


def _usual(costs: deque[float]) -> float:
    counted = sorted(costs)[: max(1, len(costs) - len(costs) // _OUTLIERS)]
    return statistics.fmean(counted)


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """What is won if the guess is right, against what is lost if it is wrong
    (contracts/expert_slots.py)."""
    return precision * hidden_s > (1.0 - precision) * wait_s
