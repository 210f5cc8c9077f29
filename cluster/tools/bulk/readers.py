"""Readers of JSONL, CSV and Parquet. Each row is decoded alone: a bad one affects no other."""

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow
import pyarrow.parquet

from cluster.batch.lines import BYTE_ORDER_MARK, MAX_LINE_BYTES, READ_BYTES, split_lines
from cluster.tools.bulk.records import Fields, InputRecord, Reject, parse_record
from contracts.errors import ConfigError

MAX_CSV_ROW_CHARACTERS = 8 << 20
BATCH_ROWS = 4096


class OpenFile(NamedTuple):
    """Rows of a file, in order, and a function that returns how many of its bytes are consumed.

    The rows raise OSError or ArrowException where the file cannot be read.
    """

    rows: Iterator[InputRecord]
    position: Callable[[], int]


def read_lines(name: str, read: Callable[[int], bytes], fields: Fields) -> Iterator[InputRecord]:
    """Yield the rows of JSONL. read: of the decompressed file."""
    decode = msgspec.json.Decoder().decode
    names = [(column, json.dumps(column).encode()) for column in _column_names(fields)]
    for number, line in enumerate(split_lines(read), start=1):
        place = f"{name}:{number}"
        try:
            values = _object(line, decode, names)
        except ValueError as error:
            yield Reject(place, place, str(error))
        else:
            yield parse_record(fields, place, values)


def _object(
    line: bytes | None, decode: Callable[[bytes], Any], names: Sequence[tuple[str, bytes]]
) -> dict[str, object]:
    """Return the object of a line. Raises ValueError. names: of columns, plain and quoted."""
    if line is None:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        values = decode(line)
        repeated = _repeated_name(line, names)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"not valid JSON: {error}" if line.strip() else "empty line") from None
    except RecursionError:
        raise ValueError("not usable JSON: nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {type(values).__name__}")
    if repeated is not None:
        raise ValueError(f"{repeated}: occurs twice in the object")
    return values


def _repeated_name(line: bytes, names: Sequence[tuple[str, bytes]]) -> str | None:
    """Return a field that an object states twice, of which decoders keep the last value."""
    for name, quoted in names:
        if line.count(quoted) > 1:
            pairs = json.loads(line, object_pairs_hook=list)
            if sum(pair[0] == name for pair in pairs) > 1:
                return name
    return None


def read_csv(name: str, read: Callable[[int], bytes], fields: Fields) -> Iterator[InputRecord]:
    """Return the rows of CSV. Raises ConfigError if its header does not fit.

    Quotes follow RFC 4180: a quoted value may have line ends. A row with a quote that is never
    closed, or with text behind a closing quote, is rejected, and the next line begins a row: such a
    quote takes no other row with it. Values are bytes, each decoded alone.
    """
    rows = _csv_rows(_CsvLines(read))
    first = next(rows, None)
    if not isinstance(first, list):
        raise ConfigError(f"{name}: the header cannot be read: {first or 'there is none'}")
    header = [column.decode() for column in first]
    _present(name, fields, header)
    return _csv_records(name, rows, header, fields)


def _csv_records(
    name: str, rows: Iterator[list[bytes] | str], header: Sequence[str], fields: Fields
) -> Iterator[InputRecord]:
    for number, row in enumerate(rows, start=1):
        place = f"{name}:{number}"
        if isinstance(row, str):
            yield Reject(place, place, row)
        elif len(row) != len(header):
            yield Reject(place, place, f"{len(row)} columns where the header has {len(header)}")
        else:
            values: dict[str, object] = dict(zip(header, row, strict=True))
            yield parse_record(fields, place, values)


def _csv_rows(lines: "_CsvLines") -> Iterator[list[bytes] | str]:
    """Yield the values of each row, or why it cannot be read."""
    csv.field_size_limit(MAX_CSV_ROW_CHARACTERS)
    reader = csv.reader(lines, strict=True)
    while True:
        first = lines.begin_row()
        try:
            row = next(reader, None)
        except csv.Error as error:
            lines.retry_after_first()
            yield f"line {first}: {_csv_reason(str(error))}"
            continue
        if row is None:
            return
        yield [value.encode("utf-8", "surrogateescape") for value in row or [""]]


class _CsvLines:
    """Lines of a file for `csv.reader`. Those behind the first of a row can be read again."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._pieces = iter(lambda: read(READ_BYTES), b"")
        self._ahead: deque[str] = deque()
        self._row: list[str] = []
        self._rest = b""
        self._number = 0
        self._has_started = False

    def begin_row(self) -> int:
        """Return the number of the line that comes next."""
        self._row = []
        return self._number + 1

    def retry_after_first(self) -> None:
        self._ahead.extendleft(reversed(self._row[1:]))
        self._number -= len(self._row) - 1

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ahead:
            self._read_piece()
        self._number += 1
        self._row.append(self._ahead.popleft())
        return self._row[-1]

    def _read_piece(self) -> None:
        """Split the next piece of the file. Raises StopIteration at the end."""
        data = self._rest + next(self._pieces, b"")
        if not data:
            raise StopIteration
        if not self._has_started:
            data = data.removeprefix(BYTE_ORDER_MARK)
            self._has_started = True
        is_last = len(data) == len(self._rest)
        lines = data.splitlines(keepends=True)
        # A line that is not complete waits, as does \r, which may be half a line end.
        self._rest = b"" if is_last or not lines or data.endswith(b"\n") else lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._ahead += [line.decode("utf-8", "surrogateescape") for line in lines]


def _csv_reason(message: str) -> str:
    if "unexpected end of data" in message or "field limit" in message:
        return "a quote is opened and not closed"
    if "expected after" in message:
        return "text behind a closing quote (inside a quoted value, a quote is doubled)"
    return message


def read_parquet(name: str, size_bytes: int, file: pyarrow.NativeFile, fields: Fields) -> OpenFile:
    """Convert one batch at a time to Python objects."""
    parquet = pyarrow.parquet.ParquetFile(file)
    names = _present(name, fields, parquet.schema_arrow.names)
    total, number = max(1, parquet.metadata.num_rows), 0

    def rows() -> Iterator[InputRecord]:
        nonlocal number
        for batch in parquet.iter_batches(BATCH_ROWS, columns=names):
            columns = [_values(batch.column(column)) for column in names]
            for values in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, values, strict=True))
                yield parse_record(fields, f"{name}:{number}", row)

    return OpenFile(rows(), lambda: size_bytes * number // total)


def _values(column: pyarrow.Array) -> list[Any]:
    """Return Python values; strings as bytes, since pyarrow has not validated UTF-8."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_string_view(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    values: list[Any] = column.to_pylist()
    return values


def _column_names(fields: Fields) -> list[str]:
    return [name for name in (fields.id, fields.prefix, fields.text) if name is not None]


def _present(name: str, fields: Fields, columns: Sequence[str]) -> list[str]:
    """Return the columns to read. Raises ConfigError if a required one is missing."""
    for option, column in (("--text-field", fields.text), ("--id-field", fields.id)):
        if column is not None and column not in columns:
            listed = ", ".join(columns)[:200]
            raise ConfigError(f"{name}: no column {column!r} ({option}); it has {listed}")
    for column in _column_names(fields):
        if list(columns).count(column) > 1:
            raise ConfigError(f"{name}: more than one column {column!r}")
    return [column for column in _column_names(fields) if column in columns]
