"""All experts of a checkpoint in a file of records that are read one at a time.

    layer 0: expert 0: gate_up | down (| biases) | zeros … expert 1: …      layer 1: …
             ^ every record begins at a multiple of ALIGNED bytes

A record is read in parts, so that a read can be cancelled half-way. A file larger than free memory
is read past the page cache, which would hold each expert twice and evict other pages.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from contracts.logs import event
from contracts.machine import available_bytes
from models.experts.expert_format import ExpertFormat, SlotMemory
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

    `descriptor` reads the file; past the page cache if it `is_direct`, then in multiples of
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
    def size(self) -> int:
        return len(self._first_of) * self._experts * self.record_bytes

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

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
