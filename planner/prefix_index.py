"""Which workers hold which block: one look-up per block for all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from operator import or_


class PrefixIndex:
    """Block hash → workers as bits of an integer:

        hashes of a prompt     h0    h1    h2    h3
        holders (worker 2 1 0) 111   011   001   101
        walked, bitwise and    111   011   001   001     → worker 0: 4 blocks, 1: 2, 2: 1

    Worker 2's h3 does not count: a match is contiguous from the first block on.
    """

    def __init__(self, workers: int) -> None:
        self._holders: dict[bytes, int] = {}
        self._workers = workers

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def put(self, worker: int, digest: bytes, *, held: bool) -> None:
        before = self._holders.get(digest, 0)
        after = before | 1 << worker if held else before & ~(1 << worker)
        if after:
            self._holders[digest] = after
        elif before:
            del self._holders[digest]

    def add(self, worker: int, digests: Sequence[bytes]) -> None:
        """`put` of many, on the path of a decision: new ones in bulk."""
        holders, bit = self._holders, 1 << worker
        if holders.keys().isdisjoint(digests):
            holders.update(dict.fromkeys(digests, bit))
            return
        for digest in digests:
            holders[digest] = holders.get(digest, 0) | bit

    def discard(self, worker: int, digests: Sequence[bytes]) -> None:
        """`worker` no longer holds these, all of which it held."""
        holders, others = self._holders, ~(1 << worker)
        for digest in digests:
            left = holders.pop(digest) & others
            if left:
                holders[digest] = left

    def matches(self, hashes: Sequence[bytes], beside: PrefixIndex | None = None) -> list[int]:
        """Leading blocks of `hashes` that each worker holds, here or in `beside`."""
        matched = [len(hashes)] * self._workers
        alive = (1 << self._workers) - 1
        blocks = 0
        for holders, run in groupby(self._holders_of(hashes, beside)):
            gone = alive & ~holders
            alive ^= gone
            while gone:
                worker = gone.bit_length() - 1
                matched[worker] = blocks
                gone ^= 1 << worker
            if not alive:
                break
            blocks += len(list(run))
        return matched

    def match(self, worker: int, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that `worker` holds."""
        blocks = 0
        for holders, run in groupby(self._holders_of(hashes, None)):
            if not holders >> worker & 1:
                break
            blocks += len(list(run))
        return blocks

    def _holders_of(self, hashes: Sequence[bytes], beside: PrefixIndex | None) -> Iterator[int]:
        """Block by block. Neighbours in a prompt mostly have the same."""
        here = map(self._holders.get, hashes, repeat(0))
        if beside is None or not beside._holders:
            return here
        return map(or_, here, map(beside._holders.get, hashes, repeat(0)))
