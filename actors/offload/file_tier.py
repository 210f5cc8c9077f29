"""A file of experts as the slow tier of a cache, read by a separate process."""

from __future__ import annotations

import errno
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from actors.offload.tier_process import (
    ENDED,
    ENTRY,
    ENTRY_BYTES,
    FAILED,
    FREE,
    REQUESTED,
    SKIP_AT,
    SKIPPED,
    URGENCY_AT,
    staging_at,
)
from contracts.errors import ChannelError
from models.experts.expert_file import PART_BYTES, ExpertFile, FileRange
from models.experts.expert_format import SlotMemory
from models.experts.expert_tier import CompletedRead

ENTRIES: Final = 16  # concurrent reads
_END_S: Final = 2.0
_ROOT: Final = Path(__file__).resolve().parents[2]


class FileTier:
    """A `Tier` over a file. parts: number of reads per expert."""

    def __init__(self, file: ExpertFile) -> None:
        self._file, self.parts = file, file.parts
        self.expert_bytes = file.expert_bytes
        self._part_bytes = min(PART_BYTES, self._record_bytes)
        staging = staging_at(ENTRIES)
        size = staging + ENTRIES * self._part_bytes
        memory = os.memfd_create("tandem-experts", os.MFD_CLOEXEC)
        os.ftruncate(memory, size)
        self._memory = mmap.mmap(memory, size)
        self._view = memoryview(self._memory)
        self._parts = [
            self._view[first : first + self._part_bytes]
            for first in range(staging, size, self._part_bytes)
        ]
        self._free = list(range(ENTRIES))
        self._reads: dict[int, int] = {}  # entry -> part of the file's record
        self._sequence = self._unsignalled = 0
        bell, self._bell = os.pipe2(os.O_CLOEXEC)
        self._done, done = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._awake = done  # a byte written there ends a `wait`
        os.set_blocking(self._bell, False)
        descriptors = (memory, file.descriptor, bell, done)
        arguments = [*descriptors, ENTRIES, self._part_bytes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.offload.tier_process", *map(str, arguments)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            cwd=_ROOT,
            start_new_session=True,  # the worker handles terminal interrupts
        )
        os.close(memory)
        os.close(bell)
        self._poll = select.poll()
        self._poll.register(self._done, select.POLLIN)

    def __str__(self) -> str:
        return str(self._file)

    @property
    def _record_bytes(self) -> int:
        return self._file.record_bytes

    @property
    def room(self) -> int:
        return len(self._free)

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        entry = self._free.pop()
        offset, size = self._range_of(layer, expert, part)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        at = entry * ENTRY_BYTES
        ENTRY.pack_into(self._view, at, FREE, urgency, 0, self._sequence, offset, size, 0, 0.0)
        self._view[at] = REQUESTED
        self._reads[entry] = part
        self._unsignalled += 1
        return entry

    def _range_of(self, layer: int, expert: int, part: int) -> FileRange:
        return self._file.range_of(layer, expert, part)

    def submit(self) -> None:
        """Wake the reader. Raises ChannelError if it has ended."""
        rings, self._unsignalled = self._unsignalled, 0
        try:
            os.write(self._bell, b"r" * rings)
        except BlockingIOError:
            pass  # the reader has enough to wake up for
        except BrokenPipeError:
            raise self._lost() from None

    def expedite(self, ticket: int, urgency: int) -> None:
        self._view[ticket * ENTRY_BYTES + URGENCY_AT] = urgency

    def cancel(self, ticket: int) -> None:
        self._view[ticket * ENTRY_BYTES + SKIP_AT] = 1

    def poll_completed(self) -> Iterable[CompletedRead]:
        if not self._reads:
            return ()
        view = self._view
        return [self._result(e) for e in self._reads if view[e * ENTRY_BYTES] in ENDED]

    def _result(self, entry: int) -> CompletedRead:
        state, _, _, _, offset, size, number, spent_s = ENTRY.unpack_from(
            self._view, entry * ENTRY_BYTES
        )
        if state == FAILED:
            cut = number == errno.ENODATA
            why = "it is cut short: remove it to recreate it" if cut else os.strerror(number)
            return CompletedRead(entry, 0.0, f"{self._file}: {size} bytes at {offset}: {why}")
        return CompletedRead(entry, 0.0 if state == SKIPPED else spent_s)

    def copy(self, ticket: int, into: SlotMemory) -> None:
        self._file.scatter(self._reads[ticket], self._parts[ticket], into)

    def free(self, ticket: int) -> None:
        self._view[ticket * ENTRY_BYTES] = FREE
        del self._reads[ticket]
        self._free.append(ticket)

    def wait(self, timeout_s: float) -> None:
        if self._poll.poll(1e3 * timeout_s):
            os.read(self._done, 4096)
        elif self._reads and self._process.poll() is not None:
            raise self._lost()

    def fileno(self) -> int:
        return self._done

    def wake(self) -> None:
        with suppress(OSError):  # awake already, or closed
            os.write(self._awake, b"w")

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._bell < 0:
            return
        os.close(self._bell)  # ends the process
        self._bell = -1
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # blocked in a read
            self._process.kill()
        os.close(self._done)
        os.close(self._awake)
        for view in (*self._parts, self._view):
            view.release()
        self._memory.close()
        self._file.close()

    def _lost(self) -> ChannelError:
        return ChannelError(
            f"{self._file}: the process that reads it has ended with {self._process.poll()}"
        )
