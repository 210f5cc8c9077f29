"""Read parts of experts from a file into memory shared with a worker.

A separate process, because reader threads in the worker would compete for its interpreter.

    python -m actors.offload.tier_process MEMORY FILE BELL DONE ENTRIES PART_BYTES
    (descriptors)

The memory holds ENTRIES entries of ENTRY bytes and, from the next page on, as many parts. The
worker owns an entry in state FREE or an end state; the reader owns it in between. Its owner writes
the state last. The process ends when the worker closes the bell.
"""

import errno
import mmap
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Final

ENTRY: Final = struct.Struct("<BBBxIqIid")  # state, urgency, skip, number, offset, size, errno, s
ENTRY_BYTES: Final = 64
READERS: Final = 2
FREE, REQUESTED, READING, READ, FAILED, SKIPPED = range(6)
ENDED: Final = (READ, FAILED, SKIPPED)
URGENCY_AT, SKIP_AT = 1, 2  # in an entry


def staging_at(entries: int) -> int:
    """Return the offset of the first part."""
    return -(-entries * ENTRY_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class _Reader:
    def __init__(
        self, memory: mmap.mmap, file: int, bell: int, done: int, entries: int, part_bytes: int
    ) -> None:
        self._view = memoryview(memory)
        self._file, self._bell, self._done = file, bell, done
        self._entries, self._part_bytes = entries, part_bytes
        self._staging = staging_at(entries)
        self._choosing = threading.Lock()

    def run(self) -> None:
        while True:
            entry = self._next()
            if entry is None:
                if not os.read(self._bell, 1):
                    os._exit(0)  # the worker has closed the bell
                continue
            self._read(entry)
            with suppress(BlockingIOError):  # full: the worker has enough to wake up for
                os.write(self._done, b"r")

    def _next(self) -> int | None:
        """Claim the most urgent request, the oldest among equals."""
        best, found = (256, 0), None
        with self._choosing:
            for entry in range(self._entries):
                at = entry * ENTRY_BYTES
                if self._view[at] != REQUESTED:
                    continue
                _, urgency, _, number, *_ = ENTRY.unpack_from(self._view, at)
                if (urgency, number) < best:
                    best, found = (urgency, number), entry
            if found is not None:
                self._view[found * ENTRY_BYTES] = READING
        return found

    def _read(self, entry: int) -> None:
        at = entry * ENTRY_BYTES
        _, urgency, skip, number, offset, size, _, _ = ENTRY.unpack_from(self._view, at)
        state, failure, start_s = SKIPPED, 0, time.monotonic()
        if not skip:
            first = self._staging + entry * self._part_bytes
            state, failure = self._pread(self._view[first : first + size], offset)
        spent_s = max(1e-9, time.monotonic() - start_s)
        ENTRY.pack_into(
            self._view, at, READING, urgency, skip, number, offset, size, failure, spent_s
        )
        self._view[at] = state

    def _pread(self, into: memoryview, offset: int) -> tuple[int, int]:
        try:
            got = os.preadv(self._file, [into], offset)
        except OSError as error:
            return FAILED, error.errno or errno.EIO
        return (READ, 0) if got == len(into) else (FAILED, errno.ENODATA)


def main() -> None:
    memory, file, bell, done, entries, part_bytes = map(int, sys.argv[1:])
    shared = mmap.mmap(memory, staging_at(entries) + entries * part_bytes)
    reader = _Reader(shared, file, bell, done, entries, part_bytes)
    for _ in range(READERS - 1):
        threading.Thread(target=reader.run, daemon=True).start()
    reader.run()


if __name__ == "__main__":
    main()
