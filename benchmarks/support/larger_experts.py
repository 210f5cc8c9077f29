"""A file of experts that is read as if they were larger: so many bytes are read and copied for
each, of which its own are used. Reads and copies are real, their ratio to the compute is chosen."""

import os

from actors.offload.file_tier import PART_BYTES, ExpertFile, FileRange, FileTier
from models.experts.expert_format import SlotMemory


class LargerTier(FileTier):
    """times: how large. Of experts that are read in one part each."""

    def __init__(self, file: ExpertFile, times: int) -> None:
        self._times, self._size = times, os.fstat(file.descriptor).st_size
        super().__init__(file)
        if file.parts > 1:
            raise ValueError(f"{file}: experts of {file.record_bytes} bytes need not be larger")
        self.parts = -(-self._record_bytes // PART_BYTES)
        self._own_at: dict[int, int] = {}  # by entry: where the expert's own bytes stand
        self._spare = memoryview(bytearray(self._part_bytes))

    @property
    def _record_bytes(self) -> int:
        return self._times * self._file.record_bytes

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        entry = super().enqueue(layer, expert, part, urgency)
        self._own_at.pop(entry, None)
        if part == 0:
            own, read = self._file.range_of(layer, expert, 0), self._range_of(layer, expert, 0)
            self._own_at[entry] = own.offset - read.offset
        return entry

    def _range_of(self, layer: int, expert: int, part: int) -> FileRange:
        """The file's end is read in place of what would lie behind it."""
        first = part * self._part_bytes
        size = min(self._part_bytes, self._record_bytes - first)
        own = self._file.range_of(layer, expert, 0)
        return FileRange(max(0, min(own.offset + first, self._size - size)), size)

    def copy(self, ticket: int, into: SlotMemory) -> None:
        read = self._parts[ticket]
        own_at = self._own_at.get(ticket)
        if own_at is None:
            self._spare[:] = read
            return
        own = read[own_at : own_at + self._file.record_bytes]
        self._file.scatter(0, own, into)
        rest = self._part_bytes - self._file.record_bytes
        self._spare[:rest] = read[:rest]
