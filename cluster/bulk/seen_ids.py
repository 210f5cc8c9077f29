"""Which ids have been there before, in 8 bytes an id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.bulk.rows import RowId

Hashes = NDArray[np.uint64]


class SeenIds:
    """64-bit hashes of all ids so far, in sorted runs, each at least twice as long as the next.

    8 bytes an id, 16 while runs merge. Two ids with one hash would count as equal: among 10 million
    ids the chance that there are any is 3e-6, among 1e9 it is 3 %.
    """

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    @property
    def num_bytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def add(self, ids: Sequence[RowId]) -> list[bool]:
        """For each id in turn whether it is new: neither seen before nor earlier in `ids`."""
        if not ids:
            return []
        hashes = np.fromiter(map(_hash, ids), np.uint64, len(ids))
        unique, first = np.unique(hashes, return_index=True)
        known = np.zeros(len(unique), bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[at] == unique
        is_new = np.zeros(len(ids), bool)
        is_new[first[~known]] = True
        self._insert(unique[~known])
        return list(map(bool, is_new))

    def _insert(self, run: Hashes) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")
        self._runs.append(run)


def _hash(row_id: RowId) -> int:
    """The string "1" and the number 1 are two ids."""
    digest = hashlib.blake2b(msgspec.json.encode(row_id), digest_size=8).digest()
    return int.from_bytes(digest, "little")
