"""Which of several predictions is believed: the one that has foretold the latest batches best.

Each contender says what a batch will take before anybody has learned from it. The believed one
gives way only to another whose median error over the same batches is lower by a margin, and whose
error was lower in most of them; then all start anew: so a contender is believed for what it said
of batches later than the last switch.
Pure; O(contenders) per batch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

TRIAL_BATCHES = 16  # that the believed one and its successor have both predicted
LEAST_GAIN = 0.2  # of the believed one's median error, which is relative
LEAST_WINS = 12  # of TRIAL_BATCHES: by chance in 4 of 100 trials
LEAST_DIFFERENCE = 0.005  # of the measured time: below, errors are alike


class Trial:
    """`believed` is the index of a contender: at first 0."""

    def __init__(self, contenders: int) -> None:
        self.believed = 0
        self._errors = [deque[float](maxlen=TRIAL_BATCHES) for _ in range(contenders)]

    def add(self, predicted_ms: Sequence[float], measured_ms: float) -> None:
        """Takes what each contender said of a batch before it ran. measured_ms: above 0."""
        for errors, said_ms in zip(self._errors, predicted_ms, strict=True):
            errors.append(abs(said_ms - measured_ms) / measured_ms)
        if len(self._errors[0]) < TRIAL_BATCHES:
            return
        medians = [statistics.median(errors) for errors in self._errors]
        best = min(range(len(medians)), key=medians.__getitem__)
        mine, errors = medians[self.believed], self._errors[self.believed]
        wins = sum(his < my for his, my in zip(self._errors[best], errors, strict=True))
        gain = mine - medians[best]
        if wins >= LEAST_WINS and gain > max(LEAST_DIFFERENCE, LEAST_GAIN * mine):
            self.believed = best
            for errors in self._errors:
                errors.clear()
