"""Types of a bulk job's rows, from file to answer."""

import msgspec

RowId = str | int


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
