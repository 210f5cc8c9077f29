"""The output folder of a bulk job, and its recovery after a crash.

    job.json            the job; the folder of another job is refused
    part-00000.jsonl    answers of window 0, in the order of the input; final
    rejected.jsonl      rejected rows, window after window
    ledger.jsonl        one line per committed window: its counts, and the size of rejected.jsonl
    journal-00007.jsonl answers of an open window, in order of arrival
    summary.json        present when the job is complete

A line of the ledger commits a window. The files are written and synced in this order:
rejected.jsonl, part (under another name, then renamed), ledger. After a crash `Output`
restores the ledger's state: it truncates rejected.jsonl, removes uncommitted parts, and keeps the
journals of open windows up to their last complete line.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from cluster.batch.lines import sync, write_whole
from cluster.tools.bulk.records import Reject, RowOutcome, Window
from contracts.errors import ConfigError, JobError, writing

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


JOB, LEDGER, REJECTED, SUMMARY = "job.json", "ledger.jsonl", "rejected.jsonl", "summary.json"
LOCK = ".lock"
# at import: msgspec crashes if two threads create a type's first decoder at once
_COMMITTED = msgspec.json.Decoder(Committed)
_decode_job = msgspec.json.Decoder(dict[str, Any]).decode


class Output:
    """The locked output folder. committed: the committed windows, from window 0 on."""

    def __init__(self, folder: Path, job: dict[str, Any], *, resume: bool) -> None:
        """Open the folder.

        Raises ConfigError if it holds something else, or this job without `resume`.
        """
        self.folder, self._lock = folder, _claim(folder)
        try:
            _check_job(folder, job, resume)
            self.committed = _repair(folder)
            self._rejected = (folder / REJECTED).open("ab")
            self._ledger = (folder / LEDGER).open("ab")
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        for file in (self._rejected, self._ledger, self._lock):
            file.close()

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a complete job, or None."""
        path = self.folder / SUMMARY
        return msgspec.json.decode(path.read_bytes()) if path.exists() else None

    def journal(self, window: Window) -> Journal:
        """Open the window's journal. Raises JobError if its input has changed."""
        return Journal(self.folder / journal_name(window.number), window)

    def check_unchanged(self, window: Window) -> None:
        """Raise JobError if a committed window differs from this run's."""
        if self.committed[window.number].digest != window.digest:
            raise input_changed(window)

    def commit(self, done: Committed, lines: Iterable[bytes], rejects: Sequence[Reject]) -> None:
        """Commit a window. done: without `rejected_bytes`. Windows are committed in order."""
        self._rejected.write(msgspec.json.Encoder().encode_lines(rejects))
        sync(self._rejected)
        write_whole(self.folder / part_name(done.window), b"".join(lines))
        done = msgspec.structs.replace(done, rejected_bytes=self._rejected.tell())
        self._ledger.write(msgspec.json.encode(done) + b"\n")
        sync(self._ledger)
        self.committed.append(done)
        (self.folder / journal_name(done.window)).unlink(missing_ok=True)

    def finish(self, summary: dict[str, Any]) -> None:
        write_whole(self.folder / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))


def part_name(window: int) -> str:
    return f"part-{window:05d}.jsonl"


def journal_name(window: int) -> str:
    return f"journal-{window:05d}.jsonl"


def _claim(folder: Path) -> BinaryIO:
    """Create the folder and lock it until this process ends."""
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"--output {folder}: another run is at work in this folder") from None
    return lock


def _check_job(folder: Path, job: dict[str, Any], resume: bool) -> None:
    path = folder / JOB
    if not path.exists():
        strangers = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        if strangers:
            raise ConfigError(
                f"--output {folder}: not empty ({strangers[0]}), and no bulk job's folder"
            )
        write_whole(path, msgspec.json.format(msgspec.json.encode(job)))
        return
    try:
        before = _decode_job(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    now = _decode_job(msgspec.json.encode(job))
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            difference = _difference(key, before.get(key), now.get(key))
            raise ConfigError(f"--output {folder}: holds another job: {difference}")
    if not resume:
        raise ConfigError(
            f"--output {folder}: holds a run of this job already; go on with --resume, or give "
            "another folder"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    if key != "inputs":
        return f"{key} was {_short(before)}, now {_short(now)}"
    old, new = ({file["name"]: file for file in files or ()} for files in (before, now))
    for name in (*old, *new):
        if name not in new:
            return f"{name} is not an input any more"
        if name not in old:
            return f"{name} was not an input"
        if old[name] != new[name]:
            return f"the input {name} has changed"
    return "the order of the inputs has changed"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _repair(folder: Path) -> list[Committed]:
    """Restore the folder to the state of the ledger, and return the ledger."""
    ledger, rejected = folder / LEDGER, folder / REJECTED
    ledger.touch()
    rejected.touch()
    committed, size = whole_lines(ledger.read_bytes(), _COMMITTED)
    os.truncate(ledger, size)
    parts = {part_name(line.window) for line in committed}
    present = {path.name for path in folder.glob("part-*.jsonl")}
    for name in present - parts:
        (folder / name).unlink()
    for line in committed:
        (folder / journal_name(line.window)).unlink(missing_ok=True)
    if missing := sorted(parts - present):
        raise ConfigError(f"{folder}: {missing[0]} is in the ledger, but missing")
    expected = committed[-1].rejected_bytes if committed else 0
    if rejected.stat().st_size < expected:
        raise ConfigError(f"{rejected}: shorter than when its last window was finished")
    os.truncate(rejected, expected)
    return committed
