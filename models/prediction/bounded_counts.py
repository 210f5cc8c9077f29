"""Counts and samples in bounded memory. Counts of keys: Misra and Gries' counters, by batches.

    more than `limit` keys   ──> the (limit + 1)th largest count is subtracted from all of them,
                                 and keys without a rest are dropped

No count is too large, and none is short by more than the subtracted total, which is at most
occurrences / (limit + 1): more frequent keys are always present (Agarwal et al., "Mergeable
Summaries", 2012).

Uniform samples of tokens, from a stream of unknown length (Vitter's Algorithm R) or merged:

    ids [P, 2] int32                 token id, and the previous one (-1: none)
    paths [P, moe layers, K] int16   its experts, in each router's order
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class TopCounts(NamedTuple):
    """Unique keys in ascending order, and their counts."""

    keys: Counts
    times: Counts

    def add(self, other: TopCounts) -> TopCounts:
        keys, where = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        times = np.zeros(len(keys), np.int64)
        np.add.at(times, where, np.concatenate([self.times, other.times]))
        return TopCounts(keys, times)

    def truncate(self, limit: int) -> TopCounts:
        if len(self.keys) <= limit:
            return self
        rest = self.times - np.partition(self.times, -limit - 1)[-limit - 1]
        return TopCounts(self.keys[rest > 0], rest[rest > 0])


class BoundedCounts:
    """Counts of integer keys: at most 2 * limit, and `limit` pending ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._top = TopCounts(np.empty(0, np.int64), np.empty(0, np.int64))
        self._waiting: list[Counts] = []
        self._room = limit

    def add(self, keys_N: Counts) -> None:
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
            self._top = self._top.add(TopCounts(keys, times))
        if len(self._top.keys) > 2 * self._limit:
            self._top = self._top.truncate(self._limit)

    def counted(self) -> TopCounts:
        """Return at most `limit` counts."""
        self._count()
        return self._top.truncate(self._limit)


_MAX_EXACT: Final = 10**9  # numpy's bound of the hypergeometric distribution; above, binomial


class RoutingPaths(NamedTuple):
    ids_P2: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]

    def select(self, which: NDArray[np.int64]) -> RoutingPaths:
        return RoutingPaths(self.ids_P2[which], self.paths_PLK[which])


class PathSample:
    """A sample of at most `limit` tokens, which depends on tokens and seed, not on batches."""

    def __init__(self, limit: int, layers: int, top_k: int, seed: int) -> None:
        self._limit, self._seen = limit, 0
        self._ids: list[NDArray[np.int32]] = []
        self._paths: list[NDArray[np.int16]] = []
        self._full: RoutingPaths | None = None
        self._empty = RoutingPaths(
            np.empty((0, 2), np.int32), np.empty((0, layers, top_k), np.int16)
        )
        self._random = np.random.default_rng(seed)

    def add(self, ids_T2: NDArray[np.int32], paths_TLK: NDArray[np.int16]) -> None:
        """Add tokens in order. The arrays are copied."""
        free = max(0, self._limit - self._seen)
        if free:
            self._ids.append(ids_T2[:free].copy())
            self._paths.append(paths_TLK[:free].copy())
        late = np.arange(self._seen + min(free, len(ids_T2)), self._seen + len(ids_T2))
        self._seen += len(ids_T2)
        if len(late) == 0:
            return
        if self._full is None:
            self._full = self.sample()
        slots = (self._random.random(len(late)) * (late + 1)).astype(np.int64)
        taken = np.flatnonzero(slots < self._limit)
        self._full.ids_P2[slots[taken]] = ids_T2[free + taken]  # the last of equal slots counts
        self._full.paths_PLK[slots[taken]] = paths_TLK[free + taken]

    def sample(self) -> RoutingPaths:
        """Return the sample as new arrays."""
        if self._full is not None:
            return RoutingPaths(self._full.ids_P2.copy(), self._full.paths_PLK.copy())
        ids, paths = [self._empty.ids_P2, *self._ids], [self._empty.paths_PLK, *self._paths]
        return RoutingPaths(np.concatenate(ids), np.concatenate(paths))


def subsample(paths: RoutingPaths, limit: int) -> RoutingPaths:
    """Return at most `limit` paths, in order."""
    if len(paths.ids_P2) <= limit:
        return paths
    random = np.random.default_rng(len(paths.ids_P2))
    return paths.select(np.sort(random.choice(len(paths.ids_P2), limit, replace=False)))


def merge_samples(
    one: RoutingPaths, seen: int, other: RoutingPaths, other_seen: int, limit: int
) -> RoutingPaths:
    """Merge two samples of `seen` and `other_seen` tokens into one of all tokens."""
    if len(one.ids_P2) + len(other.ids_P2) <= limit and (
        len(one.ids_P2) == seen and len(other.ids_P2) == other_seen
    ):
        return _concatenate(one, other)
    limit = min(limit, *(  # limited by the sparser sample
        len(paths.ids_P2) * (seen + other_seen) // count
        for paths, count in ((one, seen), (other, other_seen))
        if count
    ))  # fmt: skip
    random = np.random.default_rng([seen, other_seen])
    if max(seen, other_seen) < _MAX_EXACT // 2:
        of_one = int(random.hypergeometric(seen, other_seen, min(limit, seen + other_seen)))
    else:
        of_one = int(random.binomial(limit, seen / (seen + other_seen)))
    of_one = max(min(of_one, len(one.ids_P2)), limit - len(other.ids_P2))
    return _concatenate(subsample(one, of_one), subsample(other, limit - of_one))


def _concatenate(one: RoutingPaths, other: RoutingPaths) -> RoutingPaths:
    return RoutingPaths(
        np.concatenate([one.ids_P2, other.ids_P2]), np.concatenate([one.paths_PLK, other.paths_PLK])
    )
