"""Rows of a bulk job from file to answer, and their windows and chunks."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from cluster.batch.lines import SeenIds

RowId = str | int
Item = TypeVar("Item")
DUPLICATE = "duplicate id: only its first row is answered"


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a row's fields.

    prefix None: the template has none. id None: the id is "FILE:ROW" (rows count from 1, without a
    CSV's header).
    """

    text: str = "text"
    prefix: str | None = "prefix"
    id: str | None = None


class InputRow(msgspec.Struct, frozen=True, array_like=True):
    id: RowId
    place: str
    prefix: str
    text: str


class RowRequest(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a row that the router needs."""

    prefix: str
    text: str


class Reject(msgspec.Struct, frozen=True):
    """A row without an answer, and the reason. id: its place if it has no usable id."""

    id: RowId
    place: str
    reason: str


InputRecord = InputRow | Reject


class RowAnswer(msgspec.Struct, frozen=True, array_like=True, tag="ok"):
    """probs: in the order of the labels. Tokens are summed over all passes of the row."""

    probs: list[float]
    prompt_tokens: int
    cached_tokens: int


class GeneratedRow(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RowRejection(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A row that cannot be answered; a retry would not help."""

    reason: str


RowOutcome = RowAnswer | GeneratedRow | RowRejection


def parse_record(fields: Fields, place: str, values: dict[str, object]) -> InputRecord:
    """Build the row from field values (bytes: text that has not been decoded)."""
    row_id: RowId = place
    try:
        if fields.id is not None:
            row_id = _id(values.get(fields.id), fields.id)
        text = _string(values.get(fields.text), fields.text)
        if not text.strip():
            raise ValueError(f"{fields.text}: empty")
        prefix = "" if fields.prefix is None else values.get(fields.prefix)
        prefix = "" if prefix is None else _string(prefix, fields.prefix or "")
    except ValueError as error:
        return Reject(row_id, place, str(error))
    return InputRow(row_id, place, prefix, text)


def _string(value: object, field: str) -> str:
    if value is None:
        raise ValueError(f"{field}: missing")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{field}: not UTF-8 at byte {error.start}") from None
    if not isinstance(value, str):
        raise ValueError(f"{field}: expected a string, got {type(value).__name__}")
    return value


def _id(value: object, field: str) -> RowId:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 1 << 63:
            raise ValueError(f"{field}: an integer beyond 64 bits")
        return value
    if not isinstance(value, str | bytes | None):
        raise ValueError(f"{field}: expected a string or an integer, got {type(value).__name__}")
    text = _string(value, field)
    if not text:
        raise ValueError(f"{field}: empty")
    return text


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
