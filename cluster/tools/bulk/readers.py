"""Readers of JSONL, CSV and Parquet. Each row is decoded alone: a bad one affects no other."""

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from cluster.batch.lines import BYTE_ORDER_MARK, MAX_LINE_BYTES, READ_BYTES, split_lines
from cluster.tools.bulk.records import Fields, InputRecord, Reject, parse_record
from contracts.errors import ConfigError

MAX_CSV_ROW_CHARACTERS = 8 << 20
BATCH_ROWS = 4096


class LineReader:
    """JSONL reader. read: of the decompressed file. position: returns its compressed bytes read."""

    def __init__(
        self,
        name: str,
        size_bytes: int,
        read: Callable[[int], bytes],
        position: Callable[[], int],
        fields: Fields,
    ) -> None:
        self.size_bytes = size_bytes
        self._name, self._read, self._fields = name, read, fields
        self._position = position
        self._decoder = msgspec.json.Decoder()
        self._names = [(name, json.dumps(name).encode()) for name in _column_names(fields)]

    @property
    def read_bytes(self) -> int:
        return self._position()

    def __iter__(self) -> Iterator[InputRecord]:
        for number, line in enumerate(split_lines(self._read), start=1):
            yield self._record(f"{self._name}:{number}", line)

    def _record(self, place: str, line: bytes | None) -> InputRecord:
        if line is None:
            return Reject(place, place, f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            values: Any = self._decoder.decode(line)
            repeated = self._repeated_name(line)
        except UnicodeDecodeError as error:
            return Reject(place, place, f"not UTF-8 at byte {error.start}")
        except (msgspec.DecodeError, ValueError) as error:
            reason = f"not valid JSON: {error}" if line.strip() else "empty line"
            return Reject(place, place, reason)
        except RecursionError:
            return Reject(place, place, "not usable JSON: nested too deeply")
        if not isinstance(values, dict):
            return Reject(place, place, f"expected a JSON object, got {type(values).__name__}")
        if repeated is not None:
            return Reject(place, place, f"{repeated}: occurs twice in the object")
        return parse_record(self._fields, place, values)

    def _repeated_name(self, line: bytes) -> str | None:
        """Return a field that an object states twice, of which decoders keep the last value."""
        for name, quoted in self._names:
            if line.count(quoted) > 1:
                pairs = json.loads(line, object_pairs_hook=list)
                if sum(pair[0] == name for pair in pairs) > 1:
                    return name
        return None


class CsvReader:
    """CSV reader. Quotes follow RFC 4180: a quoted value may have line ends.

    A row with a quote that is never closed, or with text behind a closing quote, is rejected, and
    the next line begins a row: such a quote takes no other row with it. Values are bytes, each
    decoded alone.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        read: Callable[[int], bytes],
        position: Callable[[], int],
        fields: Fields,
    ) -> None:
        self.size_bytes = size_bytes
        self._name, self._fields = name, fields
        self._position = position
        self._lines = _CsvLines(read)
        header = next(self._rows(), None)
        if not isinstance(header, list):
            raise ConfigError(f"{name}: the header cannot be read: {header or 'there is none'}")
        self._header = [column.decode() for column in header]
        self._columns = _present(name, fields, self._header)

    @property
    def read_bytes(self) -> int:
        return self._position()

    def __iter__(self) -> Iterator[InputRecord]:
        for number, row in enumerate(self._rows(), start=1):
            place = f"{self._name}:{number}"
            if isinstance(row, str):
                yield Reject(place, place, row)
            elif len(row) != len(self._header):
                reason = f"{len(row)} columns where the header has {len(self._header)}"
                yield Reject(place, place, reason)
            else:
                values: dict[str, object] = dict(zip(self._header, row, strict=True))
                yield parse_record(self._fields, place, values)

    def _rows(self) -> Iterator[list[bytes] | str]:
        """Yield the values of each row, or why it cannot be read."""
        csv.field_size_limit(MAX_CSV_ROW_CHARACTERS)
        reader = csv.reader(self._lines, strict=True)
        while True:
            first = self._lines.begin_row()
            try:
                row = next(reader, None)
            except csv.Error as error:
                self._lines.retry_after_first()
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


class ParquetReader:
    """Parquet reader. Converts one batch at a time to Python objects."""

    def __init__(
        self, name: str, size_bytes: int, file: pyarrow.NativeFile, fields: Fields
    ) -> None:
        self.size_bytes = size_bytes
        self._name, self._fields = name, fields
        self._file = pyarrow.parquet.ParquetFile(file)
        self._columns = _present(name, fields, self._file.schema_arrow.names)
        self._rows = 0

    @property
    def read_bytes(self) -> int:
        rows = int(self._file.metadata.num_rows)
        return self.size_bytes * self._rows // max(1, rows)

    def __iter__(self) -> Iterator[InputRecord]:
        for batch in self._file.iter_batches(BATCH_ROWS, columns=self._columns):
            columns = {name: _values(batch.column(name)) for name in self._columns}
            for index in range(batch.num_rows):
                self._rows += 1
                values = {name: column[index] for name, column in columns.items()}
                yield parse_record(self._fields, f"{self._name}:{self._rows}", values)


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
