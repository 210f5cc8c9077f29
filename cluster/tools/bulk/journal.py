"""Files that survive a crash: whole lines, and whole files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from cluster.tools.bulk.records import RowOutcome
from cluster.tools.bulk.windows import Window
from contracts.errors import JobError

Line = TypeVar("Line")


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger: a window that is done. digest: of its input. rejected_bytes: of
    rejected.jsonl after it. rows_sent_again: times that a row went to the router anew because the
    answer was lost. seconds: from the window before, or the run's start."""

    window: int
    digest: str
    rows_ok: int = 0
    rows_rejected: int = 0
    rejected_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_sent_again: int = 0
    seconds: float = 0.0


def whole_lines(data: bytes, decoder: msgspec.json.Decoder[Line]) -> tuple[list[Line], int]:
    """The lines of `data` up to the first that is torn or broken, and their bytes."""
    lines: list[Line] = []
    size = 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            lines.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
        size += len(line)
    return lines, size


def write_whole(path: Path, body: bytes) -> None:
    """The file is there with all of `body`, or as it was before, whatever happens."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(body)
        sync(file)
    partial.replace(path)
    _sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """On the disk when it returns."""
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JournalHeader(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The first line: which input the window had."""

    digest: str


class RowsSent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """So many rows go to the router now."""

    rows: int


class RowsAnswered(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """row: its place in `Window.rows`."""

    row: int
    answer: RowOutcome


JournalEntry = JournalHeader | RowsSent | RowsAnswered
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_ENTRIES: msgspec.json.Decoder[JournalEntry] = msgspec.json.Decoder(JournalEntry)


class Journal:
    """`answers`: those that are safe, an earlier run's included. `sends`: rows sent so far, some of
    them twice; also over all runs."""

    def __init__(self, path: Path, window: Window) -> None:
        """Cuts a torn end off. Raises JobError if the window was another one then."""
        self.answers: dict[int, RowOutcome] = {}
        self.sends = 0
        self._file = path.open("a+b")
        self._file.seek(0)
        entries, size = whole_lines(self._file.read(), _ENTRIES)
        self._file.truncate(size)
        for entry in entries:
            self._take(entry, window)
        if not entries:
            self._write([JournalHeader(window.digest)])

    def _take(self, entry: JournalEntry, window: Window) -> None:
        match entry:
            case JournalHeader(digest):
                if digest != window.digest:
                    raise input_changed(window)
            case RowsSent(rows):
                self.sends += rows
            case RowsAnswered(row, answer):
                self.answers[row] = answer

    def sending(self, rows: int) -> None:
        self.sends += rows
        self._write([RowsSent(rows)])

    def add(self, answers: Sequence[tuple[int, RowOutcome]]) -> None:
        """Safe from a crash of this process when it returns, from one of the machine after
        `sync`."""
        self._write([RowsAnswered(row, answer) for row, answer in answers])
        self.answers.update(answers)

    def sync(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()

    def _write(self, entries: Sequence[JournalEntry]) -> None:
        self._file.write(msgspec.json.Encoder().encode_lines(entries))
        self._file.flush()


def input_changed(window: Window) -> JobError:
    place = window.rows[0].place if window.rows else window.rejects[0].place
    return JobError(
        f"the input has changed since this job began (window {window.number}, from about "
        f"{place}): give another --output folder"
    )
