"""Whether to begin to read an expert that may be wanted, and whether to guess at all."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

TRIAL_PASSES: Final = 12  # passes of each way in a trial
BLOCK_SIZE: Final = 4  # of them at a time, so that what drifts does so for both ways
MAX_EXPLOIT_PASSES: Final = 240  # passes between two trials, at most
_FIRST_EXPLOIT_PASSES: Final = (
    24  # passes before the first trial: twice as many before each next one
)
_OUTLIERS: Final = 6  # one pass in so many, the longest, is not looked at


class PrefetchTrial:
    """Whether looking ahead costs less than it saves, found out by doing both: passes go the way
    that cost less of late, and in one of twenty the other way. No estimate of what a guess costs
    and what it hides holds on every machine; both together are measured.

        on … on │ off off off off │ on on on on │ … three of each │ the cheaper way … │ …
          kept    a block, whose first pass finds what the other way has left and does not count
    """

    def __init__(self) -> None:
        self.enabled = True
        self._costs = {way: deque[float](maxlen=TRIAL_PASSES) for way in (True, False)}
        self._exploit_passes = self._left = _FIRST_EXPLOIT_PASSES
        self._blocks = 0  # of this trial, still to come
        self._counts = False

    def record_pass(self, cost_s: float) -> None:
        """A pass has ended: the seconds in which it waited for experts, and spent on guesses."""
        if self._counts:
            self._costs[self.enabled].append(cost_s)
        self._counts = self._blocks > 0
        self._left -= 1
        if self._left == 0:
            self._switch()

    def _switch(self) -> None:
        """At the end of a trial the better way is kept for a while; then both are tried."""
        self._counts = False
        if self._blocks == 1:
            self.enabled = _trimmed_mean(self._costs[True]) <= _trimmed_mean(self._costs[False])
            self._blocks, self._left = 0, self._exploit_passes
            self._exploit_passes = min(MAX_EXPLOIT_PASSES, 2 * self._exploit_passes)
            return
        self._blocks = self._blocks - 1 if self._blocks else 2 * TRIAL_PASSES // BLOCK_SIZE
        self.enabled, self._left = not self.enabled, BLOCK_SIZE


def _trimmed_mean(costs: deque[float]) -> float:
    counted = sorted(costs)[: max(1, len(costs) - len(costs) // _OUTLIERS)]
    return statistics.fmean(counted)


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """What is won if the guess is right, against what is lost if it is wrong
    (contracts/expert_eviction.py)."""
    return precision * hidden_s > (1.0 - precision) * wait_s
