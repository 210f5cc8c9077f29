"""A file of experts as the slow tier of a cache, read by a separate process.

The file has all experts of a checkpoint as records that are read one at a time:

    layer 0: expert 0: gate_up | down (| biases) | zeros … expert 1: …      layer 1: …
             ^ every record begins at a multiple of ALIGNED bytes

A record is read in parts, so that a read can be cancelled half-way. A file larger than free memory
is read past the page cache, which would hold each expert twice and evict other pages.
"""

import errno
import logging
import mmap
import os
import select
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

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
from contracts.import_path import module_command
from contracts.logs import event
from contracts.machine import available_bytes
from models.experts.expert_format import CompletedRead, ExpertFormat, SlotMemory
from models.experts.host_experts import fingerprint, open_host_file
from models.weights.checkpoint import Checkpoint

log = logging.getLogger(f"tandem.{__name__}")

ALIGNED: Final = 4096
PART_BYTES: Final = 1 << 20  # enough for a disk's full rate, with two in flight


class FileRange(NamedTuple):
    offset: int
    size: int


class _TensorSlice(NamedTuple):
    tensor: int
    first: int
    last: int
    at: int


class ExpertFile:
    """Places of the parts of experts in the file, and of their bytes in a slot.

    `descriptor` reads the file; past the page cache with direct_io, then in multiples of
    ALIGNED.
    """

    def __init__(self, file: IO[bytes], slot_format: ExpertFormat, *, direct_io: bool) -> None:
        """file: stays open with this object, which closes it."""
        self._file, self.path = file, Path(file.name)
        self._first_of = {layer: at for at, layer in enumerate(slot_format.spec.moe_layers)}
        self._experts, sizes = slot_format.spec.num_experts, slot_format.sizes
        self.expert_bytes = sum(sizes)
        self.record_bytes = _aligned(self.expert_bytes)
        self._ranges = [
            _ranges(sizes, first, min(first + PART_BYTES, self.record_bytes))
            for first in range(0, self.record_bytes, PART_BYTES)
        ]
        self._direct = self._open_direct() if direct_io else None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def parts(self) -> int:
        return len(self._ranges)

    @property
    def descriptor(self) -> int:
        return self._file.fileno() if self._direct is None else self._direct

    def range_of(self, layer: int, expert: int, part: int) -> FileRange:
        """Return the place of a part in the file."""
        record = self._first_of[layer] * self._experts + expert
        first = part * PART_BYTES
        size = min(PART_BYTES, self.record_bytes - first)
        return FileRange(record * self.record_bytes + first, size)

    def scatter(self, part: int, read: memoryview, into: SlotMemory) -> None:
        """Copy a part that was read to its tensors."""
        for tensor, first, last, at in self._ranges[part]:
            into[tensor][first:last] = read[at : at + last - first]

    def close(self) -> None:
        """Close the descriptors; no read may be in flight."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None
        self._file.close()

    def _open_direct(self) -> int | None:
        try:
            opened = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.preadv(opened, [mmap.mmap(-1, ALIGNED)], 0)
            except OSError:
                os.close(opened)
                raise
        except OSError as error:
            event(
                log,
                "direct_io_unavailable",
                logging.WARNING,
                file=str(self.path),
                reason=f"no direct reads there: {error.strerror}",
            )
            return None
        return opened


def open_expert_file(
    folder: Path,
    slot_format: ExpertFormat,
    *,
    store: Path | None,
    deadline_s: float,
    direct_io: bool | None = None,
) -> ExpertFile:
    """Open the file of the checkpoint in `folder`; write it if it does not exist.

    store: parent of the folder of shared files (None: the temporary folder). deadline_s: time for
    another process to write it. direct_io: read past the page cache (None: if the file is larger
    than free memory). Raises CheckpointError, ResourceError.
    """
    checkpoint = Checkpoint(folder)
    name = f"records-{fingerprint(folder, slot_format.name)}"
    experts = len(slot_format.spec.moe_layers) * slot_format.spec.num_experts
    size = experts * _aligned(sum(slot_format.sizes))
    available = available_bytes()

    def write(path: Path) -> None:
        _write(checkpoint, slot_format, path, size)

    file = open_host_file(store, name, size, write, deadline_s=deadline_s)
    bypass_cache = size > available if direct_io is None else direct_io
    return ExpertFile(file, slot_format, direct_io=bypass_cache)


def _write(checkpoint: Checkpoint, slot_format: ExpertFormat, path: Path, size: int) -> None:
    event(log, "expert_file_write_started", file=str(path), bytes=size)
    pieces = slot_format.pieces(checkpoint)
    rest = bytes(_aligned(sum(slot_format.sizes)) - sum(slot_format.sizes))
    with path.open("x+b") as file:
        for layer in slot_format.spec.moe_layers:
            for expert in range(slot_format.spec.num_experts):
                for piece in pieces(layer, expert):
                    file.write(piece)
                file.write(rest)
        file.flush()
        os.fsync(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _ranges(sizes: Sequence[int], first: int, last: int) -> list[_TensorSlice]:
    """Return the parts of consecutive tensors in the byte range [first, last)."""
    found, begin = [], 0
    for tensor, size in enumerate(sizes):
        low, high = max(first, begin), min(last, begin + size)
        if low < high:
            found.append(_TensorSlice(tensor, low - begin, high - begin, low - first))
        begin += size
    return found


ENTRIES: Final = 16  # concurrent reads
_END_S: Final = 2.0


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
            [*module_command("actors.offload.tier_process"), *map(str, arguments)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
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
