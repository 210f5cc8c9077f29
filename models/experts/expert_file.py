"""All experts of a checkpoint in a file, one record each, to be read one at a time.

    layer 0: expert 0: gate_up | down (| biases) | zeros … expert 1: …      layer 1: …
             ^ every record begins at a multiple of ALIGNED bytes

A record is read in parts, so that what turns out not to be wanted can be given up half-way. Where
the file is larger than free memory it is read past the page cache, which would hold each expert a
second time and push out what others need.
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
PART_BYTES: Final = 1 << 20  # from there on a disk is at its rate, with two under way


class FileRange(NamedTuple):
    """In a file, in bytes."""

    offset: int
    size: int


class _TensorSlice(NamedTuple):
    """Bytes of a tensor, and where they stand in a part."""

    tensor: int
    first: int
    last: int
    at: int


class ExpertFile:
    """Where each part of each expert stands in the file, and what of it belongs where. `descriptor`
    reads it; past the page cache if it `is_direct`: in whole multiples of ALIGNED bytes, then."""

    def __init__(self, file: IO[bytes], slot_format: ExpertFormat, *, direct_io: bool) -> None:
        """file: open for as long as this is."""
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
        """In which an expert is read."""
        return len(self._ranges)

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self._first_of) * self._experts * self.record_bytes

    @property
    def is_direct(self) -> bool:
        """Whether it is read past the page cache."""
        return self._direct is not None

    @property
    def descriptor(self) -> int:
        return self._file.fileno() if self._direct is None else self._direct

    def range_of(self, layer: int, expert: int, part: int) -> FileRange:
        """Of a part in the file."""
        record = self._first_of[layer] * self._experts + expert
        first = part * PART_BYTES
        size = min(PART_BYTES, self.record_bytes - first)
        return FileRange(record * self.record_bytes + first, size)

    def scatter(self, part: int, read: memoryview, into: SlotMemory) -> None:
        """Copies what was read of that part to where it is computed with."""
        for tensor, first, last, at in self._ranges[part]:
            into[tensor][first:last] = read[at : at + last - first]

    def close(self) -> None:
        """Nobody reads any more."""
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
    """Of the checkpoint in `folder`; made if it is not there. store: the folder where it stands
    (None: the system's for temporary files). deadline_s: for another process to make it. direct:
    whether to read past the page cache (None: where the file is larger than free memory).

    Raises CheckpointError, ResourceError.
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
    """Of tensors that stand behind each other, what lies in [first, last)."""
    found, begin = [], 0
    for tensor, size in enumerate(sizes):
        low, high = max(first, begin), min(last, begin + size)
        if low < high:
            found.append(_TensorSlice(tensor, low - begin, high - begin, low - first))
        begin += size
    return found
