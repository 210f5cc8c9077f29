"""Windows of rows, chunks of a window, and the detection of duplicate ids."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from cluster.batch.lines import SeenIds
from cluster.tools.bulk.records import InputRecord, InputRow, Reject

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
    window: Window,
    missing: Iterable[int],
    prompt: Callable[[InputRow], str],
    rows: int,
    characters: int,
) -> Iterator[list[int]]:
    """Sort the rows `missing` (indices) by prompt and cut them into chunks.

    Rows with a common prefix are neighbours.
    """
    chunk: list[int] = []
    size = 0
    for index in sorted(missing, key=lambda at: prompt(window.rows[at])):
        chunk.append(index)
        row = window.rows[index]
        size += len(row.prefix) + len(row.text)
        if len(chunk) >= rows or size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
