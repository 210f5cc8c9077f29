"""Windows of rows, chunks of a window, and the detection of duplicate ids."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from cluster.batch.lines import SeenIds
from cluster.tools.bulk.records import InputRecord, InputRow, Reject

Item = TypeVar("Item")
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
    for number, batch in enumerate(_cut(records, limits.rows, limits.characters, _characters)):
        yield _window(number, batch, seen)


def _cut(
    items: Iterable[Item], count: int, characters: int, size: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Cut items into parts of `count`, or fewer if they reach that number of characters."""
    part: list[Item] = []
    total = 0
    for item in items:
        part.append(item)
        total += size(item)
        if len(part) >= count or total >= characters:
            yield part
            part, total = [], 0
    if part:
        yield part


def _characters(record: InputRecord) -> int:
    return len(record.prefix) + len(record.text) if isinstance(record, InputRow) else 0


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
    window: Window,
    missing: Iterable[int],
    prompt: Callable[[InputRow], str],
    rows: int,
    characters: int,
) -> Iterator[list[int]]:
    """Sort the rows `missing` (indices) by prompt and cut them into chunks.

    Rows with a common prefix are neighbours.
    """
    ordered = sorted(missing, key=lambda at: prompt(window.rows[at]))
    return _cut(ordered, rows, characters, lambda at: _characters(window.rows[at]))
