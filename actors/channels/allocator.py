"""Which bytes of a segment are free.

First fit by address, not a ring: a packet that stays for long (best-effort work parked at a layer)
would hold a ring's tail and with it the whole segment; here only its own bytes are held. And the
lowest free address is the one that was used last, so its cache lines are warm.

    0          a          b       c                 size
    |  packet  |   free   | packet|      free         |     free = [a, b), [c, size)
"""

from __future__ import annotations

from bisect import bisect_right


class FirstFit:
    """Offsets in [0, size). Sizes are taken as they come: the caller rounds them to alignment."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._starts = [0]  # of the free gaps, ascending; gaps never touch each other
        self._ends = [size]
        self._sizes: dict[int, int] = {}  # offset -> size, of what is allocated

    def allocate(self, size: int) -> int | None:
        """The lowest offset with `size` (> 0) free bytes; None: no gap is large enough."""
        for index, start in enumerate(self._starts):
            end = self._ends[index]
            if end - start >= size:
                if end - start == size:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + size
                self._sizes[start] = size
                self.used += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Gives back what `allocate` returned. Raises KeyError if it is not allocated."""
        size = self._sizes.pop(offset)
        self.used -= size
        end = offset + size
        index = bisect_right(self._starts, offset)  # the first gap above
        joins_below = index > 0 and self._ends[index - 1] == offset
        joins_above = index < len(self._starts) and self._starts[index] == end
        if joins_below and joins_above:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_below:
            self._ends[index - 1] = end
        elif joins_above:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)

    def check(self) -> None:
        """Raises AssertionError unless used + free bytes = all bytes and no two pieces overlap."""
        pieces = [(start, end, "free") for start, end in zip(self._starts, self._ends, strict=True)]
        pieces += [(start, start + size, "used") for start, size in self._sizes.items()]
        pieces.sort()
        position, last = 0, ""
        for start, end, kind in pieces:
            assert start == position < end, f"gap or overlap at byte {start}: {pieces}"
            assert (kind, last) != ("free", "free"), f"free gaps touch at byte {start}"
            position, last = end, kind
        assert position == self.size, f"{position} of {self.size} bytes accounted for"
        assert self.used == sum(self._sizes.values())
