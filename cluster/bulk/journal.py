"""Answers of a window that is not committed yet, as they come: what a resumed run need not redo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cluster.bulk.ledger import sync, whole_lines
from cluster.bulk.rows import Answer
from cluster.bulk.windows import Window
from contracts.errors import JobError


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The first line: which input the window had."""

    digest: str


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """So many rows go to the router now."""

    rows: int


class Came(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """row: its place in `Window.rows`."""

    row: int
    answer: Answer


Entry = Begun | Sent | Came
# Made here: where two threads make the first one of a type at once, msgspec crashes.
_ENTRIES: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


class Journal:
    """`answers`: those that are safe, an earlier run's included. `sends`: rows sent so far, some of
    them twice; also over all runs."""

    def __init__(self, path: Path, window: Window) -> None:
        """Cuts a torn end off. Raises JobError if the window was another one then."""
        self.answers: dict[int, Answer] = {}
        self.sends = 0
        self._file = path.open("a+b")
        self._file.seek(0)
        entries, size = whole_lines(self._file.read(), _ENTRIES)
        self._file.truncate(size)
        for entry in entries:
            self._take(entry, window)
        if not entries:
            self._write([Begun(window.digest)])

    def _take(self, entry: Entry, window: Window) -> None:
        match entry:
            case Begun(digest):
                if digest != window.digest:
                    raise input_changed(window)
            case Sent(rows):
                self.sends += rows
            case Came(row, answer):
                self.answers[row] = answer

    def sending(self, rows: int) -> None:
        self.sends += rows
        self._write([Sent(rows)])

    def add(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Safe from a crash of this process when it returns, from one of the machine after
        `sync`."""
        self._write([Came(row, answer) for row, answer in answers])
        self.answers.update(answers)

    def sync(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()

    def _write(self, entries: Sequence[Entry]) -> None:
        self._file.write(msgspec.json.Encoder().encode_lines(entries))
        self._file.flush()


def input_changed(window: Window) -> JobError:
    place = window.rows[0].place if window.rows else window.rejects[0].place
    return JobError(
        f"the input has changed since this job began (window {window.number}, from about "
        f"{place}): give another --output folder"
    )
