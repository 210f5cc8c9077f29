"""How often keys occurred, in memory that has a bound whatever they are: Misra and Gries' counters,
batch by batch (Agarwal et al., "Mergeable Summaries", 2012).

    more than `limit` keys   ──> the (most + 1)th largest number is taken from all of them,
                                and who has nothing left is left out

So no number is ever too large, and none is short by more than what was taken, `short`, which is at
most occurrences / (most + 1): who occurs more often than that is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[Any]
Times = NDArray[np.int64]


class BoundedCounts:
    """Of keys of one dtype that sorts. Between two calls it holds at most 2 * most of them, and
    `limit` that wait to be counted."""

    def __init__(self, limit: int, dtype: np.dtype[Any] | type[np.int64]) -> None:
        self._limit = limit
        self._keys: Keys = np.empty(0, dtype)
        self._times: Times = np.empty(0, np.int64)
        self._waiting: list[Keys] = []
        self._room = limit
        self._short = 0

    def add(self, keys_N: Keys) -> None:
        """Each occurred once more."""
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
        """(keys, ascending; how often each occurred; how much each of these may be short of it). At
        most `limit` keys. What is added later changes none of these arrays."""
        self._count()
        keys, times, removed = truncate_counts(self._keys, self._times, self._limit)
        return keys, times, self._short + removed

    @property
    def held(self) -> int:
        """Keys in memory, those that wait among them."""
        return len(self._keys) + self._limit - self._room


def add_counts(
    keys: Keys, times: Times, other_keys: Keys, other_times: Times
) -> tuple[Keys, Times]:
    """Keys of both, ascending, with the sums of their numbers. Each side has a key once."""
    both, where = np.unique(np.concatenate([keys, other_keys]), return_inverse=True)
    sums = np.zeros(len(both), np.int64)
    np.add.at(sums, where, np.concatenate([times, other_times]))
    return both, sums


def truncate_counts(keys: Keys, times: Times, limit: int) -> tuple[Keys, Times, int]:
    """At most so many of them, and what was taken from each number for it."""
    if len(keys) <= limit:
        return keys, times, 0
    removed = int(np.partition(times, -limit - 1)[-limit - 1])
    left = times > removed
    return keys[left], times[left] - removed, removed
