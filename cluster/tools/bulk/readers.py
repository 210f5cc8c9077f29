"""Readers of JSONL, CSV and Parquet. Each row is decoded alone: a bad one affects no other."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from cluster.tools.bulk.records import Fields, InputRecord, Reject, parse_record
from contracts.errors import ConfigError

READ_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineReader:
    """JSONL reader. stream: decompressed. position: returns the bytes read of the file itself."""

    def __init__(
        self,
        name: str,
        size_bytes: int,
        stream: pyarrow.NativeFile,
        position: Callable[[], int],
        fields: Fields,
    ) -> None:
        self.size_bytes = size_bytes
        self._name, self._stream, self._fields = name, stream, fields
        self._position = position
        self._decoder = msgspec.json.Decoder()

    @property
    def read_bytes(self) -> int:
        return self._position()

    def __iter__(self) -> Iterator[InputRecord]:
        for number, line in enumerate(split_lines(self._stream.read), start=1):
            yield self._record(f"{self._name}:{number}", line)

    def _record(self, place: str, line: bytes | None) -> InputRecord:
        if line is None:
            return Reject(place, place, f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            values: Any = self._decoder.decode(line)
        except UnicodeDecodeError as error:
            return Reject(place, place, f"not UTF-8 at byte {error.start}")
        except msgspec.DecodeError as error:
            reason = f"not valid JSON: {error}" if line.strip() else "empty line"
            return Reject(place, place, reason)
        except RecursionError:
            return Reject(place, place, "not usable JSON: nested too deeply")
        if not isinstance(values, dict):
            return Reject(place, place, f"expected a JSON object, got {type(values).__name__}")
        return parse_record(self._fields, place, values)


def split_lines(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """Yield lines without their end; None for a line that is too long."""
    rest = b""
    too_long = False
    first = True
    while data := read(READ_BYTES):
        if first:
            data = data.removeprefix(_BYTE_ORDER_MARK)
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


CSV_BLOCK_BYTES = 8 << 20  # limit of a row in a CSV file
BATCH_ROWS = 4096


class CsvReader:
    """CSV reader.

    pyarrow's invalid_row_handler reports rows with a wrong number of columns. Values are bytes,
    each decoded alone.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        stream: pyarrow.NativeFile,
        position: Callable[[], int],
        fields: Fields,
    ) -> None:
        self.size_bytes = size_bytes
        self._name, self._fields = name, fields
        self._position = position
        self._misshapen: list[tuple[int, str]] = []
        columns = _column_names(fields)
        self._reader = self._open(stream, {column: pyarrow.binary() for column in columns})
        self._columns = _present(name, fields, self._reader.schema.names)

    def _open(self, stream: pyarrow.NativeFile, types: dict[str, Any]) -> Any:
        return pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(
                newlines_in_values=True,
                ignore_empty_lines=False,
                invalid_row_handler=self._on_misshapen,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                check_utf8=False, column_types=types, strings_can_be_null=False
            ),
        )

    def _on_misshapen(self, row: Any) -> str:
        reason = f"{row.actual_columns} columns where the header has {row.expected_columns}"
        bisect.insort(self._misshapen, (row.number - 1, reason))  # the header is row 1
        return "skip"

    @property
    def read_bytes(self) -> int:
        return self._position()

    def __iter__(self) -> Iterator[InputRecord]:
        number = 0
        for batch in self._reader:
            for values in batch.select(self._columns).to_pylist():
                number += 1
                while self._misshapen and self._misshapen[0][0] == number:
                    yield self._reject_next()
                    number += 1
                yield parse_record(self._fields, f"{self._name}:{number}", values)
        while self._misshapen:
            yield self._reject_next()

    def _reject_next(self) -> Reject:
        number, reason = self._misshapen.pop(0)
        place = f"{self._name}:{number}"
        return Reject(place, place, reason)


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
