"""Which workers hold which block: one look-up per block for all workers."""

from __future__ import annotations

from collections.abc import Sequence

_NOTHING: dict[bytes, int] = {}


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

    def matches(self, hashes: Sequence[bytes], beside: PrefixIndex | None = None) -> list[int]:
        """Leading blocks of `hashes` that each worker holds, here or in `beside`."""
        matched = [len(hashes)] * self._workers
        alive = (1 << self._workers) - 1
        find = self._holders.get
        also = _NOTHING if beside is None else beside._holders
        for blocks, digest in enumerate(hashes):
            still = alive & find(digest, 0)
            if still == alive:
                continue
            still |= alive & also.get(digest, 0)
            gone = alive ^ still
            while gone:
                worker = gone.bit_length() - 1
                matched[worker] = blocks
                gone ^= 1 << worker
            alive = still
            if not alive:
                break
        return matched
