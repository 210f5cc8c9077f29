"""Counts of keys in bounded memory: Misra and Gries' counters, by batches.

    more than `limit` keys   ──> the (limit + 1)th largest count is subtracted from all of them,
                                 and keys without a rest are dropped

No count is too large, and none is short by more than the subtracted total, which is at most
occurrences / (limit + 1): more frequent keys are always present (Agarwal et al., "Mergeable
Summaries", 2012).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[Any]
Times = NDArray[np.int64]


class BoundedCounts:
    """Counts of keys of a sortable dtype: at most 2 * limit, and `limit` pending ones."""

    def __init__(self, limit: int, dtype: np.dtype[Any] | type[np.int64]) -> None:
        self._limit = limit
        self._keys: Keys = np.empty(0, dtype)
        self._times: Times = np.empty(0, np.int64)
        self._waiting: list[Keys] = []
        self._room = limit
        self._short = 0

    def add(self, keys_N: Keys) -> None:
        """Count each key once more."""
        while len(keys_N):
            now, keys_N = keys_N[: self._room], keys_N[self._room :]
            self._waiting.append(now)
            self._room -= len(now)
            if self._room == 0:
                self._count()

    def _count(self) -> None:
        if self._waiting:
            keys, times = np.unique(np.concatenate(self._waiting), return_counts=True)
            self._waiting, self._room = [], self._limit
            self._keys, self._times = add_counts(self._keys, self._times, keys, times)
        if len(self._keys) > 2 * self._limit:
            self._truncate()

    def _truncate(self) -> None:
        self._keys, self._times, removed = truncate_counts(self._keys, self._times, self._limit)
        self._short += removed

    def counted(self) -> tuple[Keys, Times, int]:
        """Return (ascending keys, counts, largest shortfall), at most `limit`, as new arrays."""
        self._count()
        keys, times, removed = truncate_counts(self._keys, self._times, self._limit)
        return keys, times, self._short + removed

    @property
    def held(self) -> int:
        """Number of keys in memory, including pending ones."""
        return len(self._keys) + self._limit - self._room


def add_counts(
    keys: Keys, times: Times, other_keys: Keys, other_times: Times
) -> tuple[Keys, Times]:
    """Return the union of keys, ascending, with summed counts. Each side's keys are unique."""
    both, where = np.unique(np.concatenate([keys, other_keys]), return_inverse=True)
    sums = np.zeros(len(both), np.int64)
    np.add.at(sums, where, np.concatenate([times, other_times]))
    return both, sums


def truncate_counts(keys: Keys, times: Times, limit: int) -> tuple[Keys, Times, int]:
    """Return at most `limit` keys, their counts, and what was subtracted from each."""
    if len(keys) <= limit:
        return keys, times, 0
    removed = int(np.partition(times, -limit - 1)[-limit - 1])
    left = times > removed
    return keys[left], times[left] - removed, removed
