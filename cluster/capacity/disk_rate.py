"""How fast a folder's disk gives what is not in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from contracts.clock import monotonic_s

BYTES: Final = 32 << 20
_PART: Final = 1 << 20  # as experts are read


class DiskRate(NamedTuple):
    """is_direct: measured past the page cache; else what the system remembers."""

    bytes_per_s: float
    is_direct: bool


def disk_rate(folder: Path) -> DiskRate:
    """Writes a file there and reads it, which takes a moment. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="tandem-rate-") as file:
        part = mmap.mmap(-1, _PART)  # page-aligned, as direct reads want it
        part.write(os.urandom(_PART))
        for _ in range(BYTES // _PART):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        try:
            return DiskRate(_read(file.name, os.O_DIRECT, part), is_direct=True)
        except OSError:
            return DiskRate(_read(file.name, 0, part), is_direct=False)


def _read(path: str, flags: int, part: mmap.mmap) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        start_s = monotonic_s()
        for first in range(0, BYTES, _PART):
            os.preadv(descriptor, [part], first)
        return BYTES / max(1e-9, monotonic_s() - start_s)
    finally:
        os.close(descriptor)
