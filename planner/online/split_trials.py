"""Choice between split and unsplit decode batches by measured times.

Stage models lack two costs of a split decode batch: its micro-batches compete for cores that both
groups use, and only an unsplit batch runs whole layers in compiled calls.

A trial runs TRIAL_REPORTS batches in the other way, and every one of them is reported. Batches
before, between and after them run in the selected way.
"""

import statistics
from collections import deque

from planner.schedule.batch_plan import BatchBucket

TRIAL_REPORTS = 4  # times that are compared
LEAST_GAIN = 0.05  # of the slower median; smaller differences change nothing
REPEAT_REPORTS = 1024  # then the other way is measured again


class SplitTrials:
    """Trials of decode batches, by their number of sequences."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def splits(self, bucket: BatchBucket) -> bool:
        """Return whether a plan may split a batch; always, if it has prompts."""
        trial = self._trials.get(bucket.decode_rows)
        return bucket.prompts > 0 or trial is None or trial.splits

    def lacks_other(self, bucket: BatchBucket) -> bool:
        """Return whether batches of this size should be measured in the other way too."""
        trial = self._trials.get(bucket.decode_rows)
        return bucket.prompts == 0 and trial is not None and trial.lacks_other

    def add(self, bucket: BatchBucket, is_split: bool, ms: float) -> bool:
        """Add a batch's measured time; return whether plans of its size change."""
        if bucket.prompts:
            return False
        return self._trials.setdefault(bucket.decode_rows, _Trial()).add(is_split, ms)


class _Trial:
    """Latest times of split and of unsplit batches."""

    def __init__(self) -> None:
        self.splits = True
        self._times_ms = {way: deque[float](maxlen=TRIAL_REPORTS) for way in (True, False)}
        self._added = 0

    @property
    def lacks_other(self) -> bool:
        return self._is_known(self.splits) and not self._is_known(not self.splits)

    def _is_known(self, way: bool) -> bool:
        return len(self._times_ms[way]) == TRIAL_REPORTS

    def add(self, is_split: bool, ms: float) -> bool:
        before, lacked, times_ms = self.splits, self.lacks_other, self._times_ms
        times_ms[is_split].append(ms)
        self._added += 1
        if self._added % REPEAT_REPORTS == 0:
            times_ms[not before].clear()
        if self._is_known(True) and self._is_known(False):
            now_ms, other_ms = (statistics.median(times_ms[way]) for way in (before, not before))
            if other_ms < (1 - LEAST_GAIN) * now_ms:
                self.splits = not before
        return (self.splits, self.lacks_other) != (before, lacked)
