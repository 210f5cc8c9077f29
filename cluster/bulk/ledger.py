"""Files that survive a crash: whole lines, and whole files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

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
