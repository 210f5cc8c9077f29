"""Choice between split and unsplit decode batches by measured times.

Stage models lack two costs of a split decode batch: its micro-batches compete for cores that both
groups use, and only an unsplit batch runs whole layers in compiled calls.
"""

import statistics
from collections import deque

from planner.online.buckets import BatchBucket

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

    def add(self, bucket: BatchBucket, is_split: bool, ms: float) -> bool:
        """Add a batch's measured time; return whether `splits` changes for its size."""
        if bucket.prompts:
            return False
        return self._trials.setdefault(bucket.decode_rows, _Trial()).add(is_split, ms)


class _Trial:
    """Latest times of split and of unsplit batches. Both are measured before one is selected."""

    def __init__(self) -> None:
        self.splits = True
        self._times_ms = {way: deque[float](maxlen=TRIAL_REPORTS) for way in (True, False)}
        self._added = 0

    def add(self, is_split: bool, ms: float) -> bool:
        before, times_ms = self.splits, self._times_ms
        times_ms[is_split].append(ms)
        self._added += 1
        if self._added % REPEAT_REPORTS == 0:
            times_ms[not before].clear()
        known = [way for way, times in times_ms.items() if len(times) == TRIAL_REPORTS]
        if known == [before]:
            self.splits = not before
        elif len(known) > 1:
            now_ms, other_ms = (statistics.median(times_ms[way]) for way in (before, not before))
            if other_ms < (1 - LEAST_GAIN) * now_ms:
                self.splits = not before
        return self.splits != before
