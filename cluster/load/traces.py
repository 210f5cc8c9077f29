"""Traces of real traffic, as they are published: when requests came, and how long they were.

.csv    TIMESTAMP (of a day), ContextTokens, GeneratedTokens      (Azure LLM inference traces)
.jsonl  timestamp (milliseconds), input_length, output_length     (Mooncake)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.load.arrivals import Lengths
from contracts.errors import ConfigError

Row = tuple[float, Lengths]  # seconds after the first one

MOST_ROWS: Final = 1_000_000
_LONGEST_LINE: Final = 1 << 20


def read_trace(path: Path) -> list[Row]:
    """By its ending, in order of time; what comes after MOST_ROWS is left. Raises ConfigError."""
    readers = {".csv": _azure_rows, ".jsonl": _mooncake_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"--trace {path}: end its name in .csv or .jsonl, for what it is")
    try:
        with path.open(encoding="utf-8") as file:
            rows = list(_bounded(reader(_lines(file.readline, path)), path))
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: not UTF-8: {error.reason}") from None
    if not rows:
        raise ConfigError(f"--trace {path}: has no rows")
    rows.sort(key=lambda row: row[0])
    first_s = rows[0][0]
    return [(at_s - first_s, lengths) for at_s, lengths in rows]


def _lines(readline: Callable[[int], str], path: Path) -> Iterator[str]:
    while line := readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise ConfigError(f"--trace {path}: a line of over {_LONGEST_LINE} characters")
        yield line


def _bounded(rows: Iterator[tuple[object, object, object]], path: Path) -> Iterator[Row]:
    for number, (at, prompt, output) in enumerate(rows, 1):
        if number > MOST_ROWS:
            return
        try:
            at_s, lengths = float(str(at)), Lengths(int(str(prompt)), int(str(output)))
        except ValueError as error:
            raise ConfigError(f"--trace {path}: row {number}: {error}") from None
        if not math.isfinite(at_s) or min(lengths) < 0:
            raise ConfigError(f"--trace {path}: row {number}: times and lengths are from 0 on")
        yield at_s, Lengths(max(1, lengths.prompt), max(1, lengths.output))


def _azure_rows(lines: Iterator[str]) -> Iterator[tuple[object, object, object]]:
    for row in csv.DictReader(lines):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at_s, row["ContextTokens"], row["GeneratedTokens"]
        except KeyError as error:
            raise ConfigError(f"--trace: no column {error}: it is no Azure trace") from None
        except (TypeError, ValueError):
            yield row.get("TIMESTAMP"), 0, 0  # told with its number


def _mooncake_rows(lines: Iterator[str]) -> Iterator[tuple[object, object, object]]:
    for line in lines:
        try:
            row: Any = msgspec.json.decode(line)
            yield row["timestamp"] / 1e3, row["input_length"], row["output_length"]
        except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
            yield line[:80].strip(), 0, 0  # told with its number
