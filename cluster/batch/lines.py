"""Lines of large files: reading, durable writing, and ids that occur twice."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

READ_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Hashes = NDArray[np.uint64]


def split_lines(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """Yield lines without their end; None for a line that is too long."""
    rest = b""
    too_long = False
    first = True
    while data := read(READ_BYTES):
        if first:
            data = data.removeprefix(BYTE_ORDER_MARK)
            first = False
        head, *lines = data.split(b"\n")
        rest += head
        for line in lines:
            yield None if too_long or len(rest) > MAX_LINE_BYTES else rest
            rest, too_long = line, False
        if len(rest) > MAX_LINE_BYTES:
            rest, too_long = b"", True
    if rest or too_long:
        yield None if too_long else rest


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, body: bytes) -> None:
    """Write the file atomically: a crash leaves the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(body)
            sync(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

    def add(self, ids: Sequence[str | int]) -> list[bool]:
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


def _hash(row_id: str | int) -> int:
    """Hash an id; the string "1" and the number 1 differ."""
    digest = hashlib.blake2b(msgspec.json.encode(row_id), digest_size=8).digest()
    return int.from_bytes(digest, "little")
