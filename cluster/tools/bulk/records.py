"""What a bulk job's rows are on their way from a file to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

RowId = str | int


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a row's fields. prefix None: the template has no place for one. id None: a row is
    called after its place, "FILE:ROW" (rows of a file count from 1, a CSV's header not counted)."""

    text: str = "text"
    prefix: str | None = "prefix"
    id: str | None = None


class InputRow(msgspec.Struct, frozen=True, array_like=True):
    id: RowId
    place: str
    prefix: str
    text: str


class Reject(msgspec.Struct, frozen=True):
    """A row that gets no answer, and why. `id` is its place where it has no usable id."""

    id: RowId
    place: str
    reason: str


InputRecord = InputRow | Reject


class RowAnswer(msgspec.Struct, frozen=True, array_like=True, tag="ok"):
    """probs in the order of the labels. Tokens count all passes that the row took."""

    probs: list[float]
    prompt_tokens: int
    cached_tokens: int


class RowRejection(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The row cannot be answered, and trying again would not help."""

    reason: str


RowOutcome = RowAnswer | RowRejection


class RecordReader(Protocol):
    """One file. `read_bytes` of `size_bytes` have been consumed so far."""

    size_bytes: int

    @property
    def read_bytes(self) -> int: ...

    def __iter__(self) -> Iterator[InputRecord]:
        """Its rows in order, each as an InputRow or a Reject. Raises InputError where the file
        cannot be read for a reason that may pass."""


def parse_record(fields: Fields, place: str, values: dict[str, object]) -> InputRecord:
    """The row with these field values (bytes: text that nobody has decoded yet)."""
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
