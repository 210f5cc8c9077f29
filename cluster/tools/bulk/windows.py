"""Windows of rows, chunks of a window, and the detection of duplicate ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.classification.classify import ClassifyTask, render_prompt
from cluster.tools.bulk.records import InputRecord, InputRow, Reject, RowId

Hashes = NDArray[np.uint64]


class SeenIds:
    """Hashes of all ids so far, 64 bits each, in sorted runs of decreasing length.

    Needs 8 bytes an id, 16 while runs merge. Ids with equal hashes count as duplicates: the
    probability of any is 3e-6 among 10 million ids, 3 % among 1e9.
    """

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    @property
    def num_bytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def add(self, ids: Sequence[RowId]) -> list[bool]:
        """Return for each id whether it is new, also within `ids`."""
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
    """Hash an id; the string "1" and the number 1 differ."""
    digest = hashlib.blake2b(msgspec.json.encode(row_id), digest_size=8).digest()
    return int.from_bytes(digest, "little")


DUPLICATE = "duplicate id: only its first row is answered"


class WindowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a window: rows, including rejected ones, and characters of text."""

    rows: int = 16_384
    characters: int = 32 << 20


class Window(msgspec.Struct, frozen=True):
    """Rows and rejected rows in the order of the input. digest: of both."""

    number: int
    rows: list[InputRow]
    rejects: list[Reject]
    digest: str

    @property
    def records(self) -> int:
        return len(self.rows) + len(self.rejects)


def split_windows(
    records: Iterable[InputRecord], limits: WindowLimits, *, ids: bool
) -> Iterator[Window]:
    """Cut records into windows. ids: reject rows whose id has occurred before."""
    seen = SeenIds() if ids else None
    for number, batch in enumerate(_batches(records, limits)):
        yield _window(number, batch, seen)


def _batches(records: Iterable[InputRecord], limits: WindowLimits) -> Iterator[list[InputRecord]]:
    batch: list[InputRecord] = []
    characters = 0
    for record in records:
        batch.append(record)
        if isinstance(record, InputRow):
            characters += len(record.prefix) + len(record.text)
        if len(batch) >= limits.rows or characters >= limits.characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _window(number: int, batch: Sequence[InputRecord], seen: SeenIds | None) -> Window:
    digest = hashlib.blake2b(msgspec.msgpack.encode(batch), digest_size=16).hexdigest()
    rows = [record for record in batch if isinstance(record, InputRow)]
    is_new = [True] * len(rows) if seen is None else seen.add([row.id for row in rows])
    fresh = iter(is_new)
    kept: list[InputRow] = []
    rejects: list[Reject] = []
    for record in batch:
        if isinstance(record, Reject):
            rejects.append(record)
        elif next(fresh):
            kept.append(record)
        else:
            rejects.append(Reject(record.id, record.place, DUPLICATE))
    return Window(number, kept, rejects, digest)


def split_chunks(
    window: Window, missing: Iterable[int], task: ClassifyTask, rows: int, characters: int
) -> Iterator[list[int]]:
    """Sort the rows `missing` (indices) by prompt and cut them into chunks.

    Rows with a common prefix are neighbours.
    """

    def prompt(index: int) -> str:
        row = window.rows[index]
        return render_prompt(msgspec.structs.replace(task, prefix=row.prefix), row.text)

    chunk: list[int] = []
    size = 0
    for index in sorted(missing, key=prompt):
        chunk.append(index)
        row = window.rows[index]
        size += len(row.prefix) + len(row.text)
        if len(chunk) >= rows or size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
