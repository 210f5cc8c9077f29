"""JSONL: one object a line. A line is judged by itself, so that a bad one costs no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow

from cluster.bulk.rows import Fields, Record, Reject, record_of

READ_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineReader:
    """stream: already decompressed. position: bytes of the file itself that have been read."""

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

    def __iter__(self) -> Iterator[Record]:
        for number, line in enumerate(lines_of(self._stream.read), start=1):
            yield self._record(f"{self._name}:{number}", line)

    def _record(self, place: str, line: bytes | None) -> Record:
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
        return record_of(self._fields, place, values)


def lines_of(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """Lines without their end; None for one that is too long to be held in memory."""
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
