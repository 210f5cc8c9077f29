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

import numpy as np
import torch

from contracts.errors import ChannelError, ResourceError
from contracts.logs import event
from contracts.machine import available_bytes, free_bytes
from models.experts.checkpoint_part import CheckpointParts
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_store import ExpertBuffer
from models.experts.host_experts import fingerprint
from models.experts.host_store import default_parent, open_shared
from models.weights.checkpoint import Checkpoint

log = logging.getLogger(f"tandem.{__name__}")

ALIGNED: Final = 4096
PART_BYTES: Final = 256 << 10  # from there on a disk is at its rate, with two under way

SlotMemory = Sequence[np.ndarray]
"""The bytes of one expert's tensors, uint8 each."""


class _Range(NamedTuple):
    """Bytes of a tensor, and where they stand in a part."""

    tensor: int
    first: int
    last: int
    at: int


class ExpertFile:
    """Read by several threads, each with a `reader` of its own."""

    def __init__(
        self, file: IO[bytes], layout: ExpertLayout, *, direct: bool, times: int = 1
    ) -> None:
        """file: open for as long as this is. times: as if experts were so many times as large: so
        many bytes are read of the same file (to measure what larger ones would take)."""
        self._file, self.path = file, Path(file.name)
        self._first_of = {layer: at for at, layer in enumerate(layout.spec.moe_layers)}
        self._experts = layout.spec.num_experts
        sizes = [piece.nbytes for piece in slot_memory(ExpertBuffer(layout, 1), 0)]
        self.expert_bytes, self._times = sum(sizes), times
        self.record_bytes = _aligned(self.expert_bytes)
        self._ranges = [
            _ranges(sizes, first, min(first + PART_BYTES, self.record_bytes))
            for first in range(0, self.record_bytes, PART_BYTES)
        ]
        self._direct = self._open_direct() if direct else None

    @property
    def parts(self) -> int:
        """In which an expert is read."""
        return len(self._ranges) * self._times

    @property
    def is_direct(self) -> bool:
        """Whether it is read past the page cache."""
        return self._direct is not None

    def __str__(self) -> str:
        return str(self.path)

    def reader(self) -> Reader:
        """For one thread."""
        return Reader(self)

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
                "experts_read_through_the_page_cache",
                logging.WARNING,
                file=str(self.path),
                reason=f"no direct reads there: {error.strerror}",
            )
            return None
        return opened

    def read(self, layer: int, expert: int, part: int, into: SlotMemory, bounce: mmap.mmap) -> None:
        """That part of an expert. Raises ChannelError."""
        part %= len(self._ranges)
        offset = (self._first_of[layer] * self._experts + expert) * self.record_bytes
        offset += part * PART_BYTES
        ranges = self._ranges[part]
        wanted = min(PART_BYTES, self.record_bytes - part * PART_BYTES)
        try:
            if self._direct is not None:
                got = os.preadv(self._direct, [memoryview(bounce)[:wanted]], offset)
                whole = np.frombuffer(bounce, np.uint8)
                for each in ranges:
                    size = each.last - each.first
                    into[each.tensor][each.first : each.last] = whole[each.at : each.at + size]
            else:
                views = [into[each.tensor][each.first : each.last].data for each in ranges]
                wanted = sum(each.last - each.first for each in ranges)
                got = os.preadv(self._file.fileno(), views, offset)
        except OSError as error:
            raise ChannelError(
                f"{self.path}: expert {expert} of layer {layer} cannot be read: {error.strerror}"
            ) from None
        if got < wanted:
            raise ChannelError(
                f"{self.path}: expert {expert} of layer {layer}: {got} of {wanted} bytes at "
                f"{offset}; the file was cut: remove it, and it is made again at the next start"
            )


class Reader:
    """With a buffer of its own, which direct reads need."""

    def __init__(self, file: ExpertFile) -> None:
        self._file, self._bounce = file, mmap.mmap(-1, PART_BYTES)

    def read(self, layer: int, expert: int, part: int, into: SlotMemory) -> None:
        """As `ExpertFile.read`."""
        self._file.read(layer, expert, part, into, self._bounce)


def slot_memory(buffer: ExpertBuffer, slot: int) -> list[np.ndarray]:
    """The bytes of what stands in a slot, in the order of the file: no copies."""
    return [piece.reshape(-1).view(torch.uint8).numpy() for piece in buffer.part(slot, slot + 1)]


def open_expert_file(
    folder: Path,
    layout: ExpertLayout,
    *,
    store: Path | None,
    deadline_s: float,
    direct: bool | None = None,
    times: int = 1,
) -> ExpertFile:
    """Of the checkpoint in `folder`; made if it is not there. store: the folder where it stands
    (None: the system's for temporary files). deadline_s: for another process to make it. direct:
    whether to read past the page cache (None: where the file is larger than free memory).

    Raises CheckpointError, ResourceError.
    """
    checkpoint = Checkpoint(folder)
    parent = store or default_parent()
    name = f"records-{fingerprint(folder, layout)}"
    record_bytes = _aligned(layout.num_bytes(1))
    size = len(layout.spec.moe_layers) * layout.spec.num_experts * record_bytes
    available = available_bytes()

    def write(path: Path) -> None:
        _write(checkpoint, layout, path, size)

    try:
        file = open_shared(parent, name, size, write, deadline_s=deadline_s)
    except OSError as error:
        raise ResourceError(
            f"{parent}: {error.strerror}; set prefill.host_store to a folder with {size} free bytes"
        ) from None
    past = size > available if direct is None else direct
    return ExpertFile(file, layout, direct=past, times=times)


def _write(checkpoint: Checkpoint, layout: ExpertLayout, path: Path, size: int) -> None:
    free = free_bytes(path.parent)
    if free < size:
        raise ResourceError(
            f"{path.parent}: {size} bytes are needed for the experts, {free} are free; set "
            "prefill.host_store to another folder"
        )
    parts, buffer = CheckpointParts(checkpoint, layout), ExpertBuffer(layout, 1)
    memory = slot_memory(buffer, 0)
    rest = bytes(_aligned(layout.num_bytes(1)) - layout.num_bytes(1))
    with path.open("x+b") as file:
        for layer in layout.spec.moe_layers:
            for expert in range(layout.spec.num_experts):
                parts.copy_part(layer, expert, expert + 1, buffer.pieces)
                for piece in memory:
                    file.write(piece.data)
                file.write(rest)
        file.flush()
        os.fsync(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _ranges(sizes: Sequence[int], first: int, last: int) -> list[_Range]:
    """Of tensors that stand behind each other, what lies in [first, last)."""
    found, begin = [], 0
    for tensor, size in enumerate(sizes):
        low, high = max(first, begin), min(last, begin + size)
        if low < high:
            found.append(_Range(tensor, low - begin, high - begin, low - first))
        begin += size
    return found
