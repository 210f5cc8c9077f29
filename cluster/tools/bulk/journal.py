"""Files that survive a crash: the journal of a window, and atomic writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.batch.lines import sync
from cluster.tools.bulk.records import RowOutcome
from cluster.tools.bulk.windows import Window
from contracts.errors import JobError

Line = TypeVar("Line")


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger: one committed window.

    digest: of its input. rejected_bytes: size of rejected.jsonl afterwards. rows_sent_again:
    repetitions after lost answers. seconds: since the previous window or the start of the run.
    """

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
    """Decode lines up to the first incomplete one; return them and their bytes."""
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


class JournalHeader(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """First line: the digest of the window's input."""

    digest: str


class RowsSent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """A number of rows has been sent to the router."""

    rows: int


class RowsAnswered(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """row: its index in `Window.rows`."""

    row: int
    answer: RowOutcome


JournalEntry = JournalHeader | RowsSent | RowsAnswered
# at import: msgspec crashes if two threads create a type's first decoder at once
_ENTRIES: msgspec.json.Decoder[JournalEntry] = msgspec.json.Decoder(JournalEntry)


class Journal:
    """Journal of one window.

    answers: recorded ones, from earlier runs too. sends: rows sent over all runs, with repetitions.
    """

    def __init__(self, path: Path, window: Window) -> None:
        """Open the journal and cut off an incomplete line.

        Raises JobError if the window's input has changed.
        """
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
        """Record answers.

        They survive a crash of this process at once, one of the machine after `sync`.
        """
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
