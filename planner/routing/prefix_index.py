"""Index of the blocks in workers' caches, and of those that open requests will leave there."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

Hashes = Sequence[bytes]


class _Run:
    """Blocks `start` to `stop` - 1 that several chains share; workers: requests per worker."""

    __slots__ = ("hashes", "start", "stop", "workers")

    def __init__(self, hashes: Hashes, start: int, stop: int, workers: dict[int, int]) -> None:
        self.hashes, self.start, self.stop = hashes, start, stop
        self.workers = workers

    def agrees_to(self, hashes: Hashes) -> int:
        """Return the first block in which a chain that starts alike differs, by bisection.

        A hash covers all blocks before its own.
        """
        known, low, high = self.hashes, self.start + 1, min(self.stop, len(hashes))
        if known[high - 1] == hashes[high - 1]:
            return high
        return bisect_left(range(high), True, low, key=lambda block: known[block] != hashes[block])


class PendingBlocks:
    """Chains of hashes per worker, counted.

    A run ends where chains diverge; operations take a few steps per run, not per block:

        h0 h1 ┬ h2 h3 h4      of h0 h1 h2 h3 h4 and h0 h1 h5: three runs, found by h0, h2 and h5,
              └ h5            and three entries in the table
    """

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return sum(run.stop - run.start for run in self._runs.values())

    def add(self, worker: int, hashes: Hashes) -> None:
        end = 0
        for run, end in self._along(hashes):
            if end < run.stop:
                self._runs[run.hashes[end]] = _Run(run.hashes, end, run.stop, dict(run.workers))
                run.stop = end
            run.workers[worker] = run.workers.get(worker, 0) + 1
        if end < len(hashes):
            self._runs[hashes[end]] = _Run(hashes, end, len(hashes), {worker: 1})

    def remove(self, worker: int, hashes: Hashes) -> None:
        """Remove a chain that was added and not removed since."""
        for run, _ in list(self._along(hashes)):
            run.workers[worker] -= 1
            if run.workers[worker] == 0:
                self._drop(run, worker)

    def clear(self, worker: int) -> None:
        for run in list(self._runs.values()):
            if worker in run.workers:
                self._drop(run, worker)

    def match(self, worker: int, hashes: Hashes) -> int:
        """Return the number of leading blocks of `hashes` that are pending at a worker."""
        return self.matches(hashes).get(worker, 0)

    def matches(self, hashes: Hashes) -> dict[int, int]:
        """Return the matches of all workers that have any.

        Workers of a run have all runs before it.
        """
        found: dict[int, int] = {}
        for run, end in self._along(hashes):
            found.update(dict.fromkeys(run.workers, end))
        return found

    def _along(self, hashes: Hashes) -> Iterator[tuple[_Run, int]]:
        """Yield the runs of a chain, each with the first block after it or outside of it.

        Raises ValueError for hashes that are not chained.
        """
        end = 0
        while end < len(hashes):
            run = self._runs.get(hashes[end])
            if run is None:
                return
            if run.start != end:
                raise ValueError(f"block {end} has the hash of block {run.start} of another prompt")
            end = run.agrees_to(hashes)
            yield run, end
            if end < run.stop:
                return

    def _drop(self, run: _Run, worker: int) -> None:
        del run.workers[worker]
        if not run.workers:
            del self._runs[run.hashes[run.start]]


def leading_blocks(hashes: Sequence[bytes], held: Callable[[bytes], bool], start: int = 0) -> int:
    """Return the leading blocks up to the first one that is not held, from `start`, by bisection.

    Caches evict a block after those that follow it (actors/kv/block_manager.py). If one did not,
    the result is the end of some held run, which the worker's first progress report corrects.
    """
    return bisect_left(hashes, True, start, key=lambda digest: not held(digest))


class PrefixIndex:
    """Block hash → workers as bits of an integer.

    hashes of a prompt     h0    h1    h2    h3
    holders (worker 2 1 0) 111   011   001   001     → worker 0: 4 blocks, 1: 2, 2: 1
    """

    def __init__(self, workers: int) -> None:
        self._holders: dict[bytes, int] = {}
        self._workers = workers

    def __len__(self) -> int:
        """Return the number of blocks that any worker has."""
        return len(self._holders)

    def add(self, worker: int, digests: Iterable[bytes]) -> None:
        holders, bit = self._holders, 1 << worker
        for digest in digests:
            holders[digest] = holders.get(digest, 0) | bit

    def discard(self, worker: int, digests: Iterable[bytes]) -> None:
        """Remove these blocks of `worker`, if it has them."""
        holders, others = self._holders, ~(1 << worker)
        for digest in digests:
            left = holders.pop(digest, 0) & others
            if left:
                holders[digest] = left

    def clear(self, worker: int) -> None:
        self.discard(worker, list(self._holders))

    def matches(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the leading blocks of `hashes` at each worker."""
        matched = [0] * self._workers
        blocks, alive = 0, self._holders_of(hashes, 0)
        while alive:
            blocks = leading_blocks(hashes, self._held_by(alive), blocks)
            left = alive & self._holders_of(hashes, blocks)
            gone, alive = alive ^ left, left
            while gone:
                worker = gone.bit_length() - 1
                matched[worker] = blocks
                gone ^= 1 << worker
        return matched

    def match(self, worker: int, hashes: Sequence[bytes]) -> int:
        """Return the leading blocks of `hashes` at `worker`."""
        return leading_blocks(hashes, self._held_by(1 << worker))

    def _held_by(self, workers: int) -> Callable[[bytes], bool]:
        get = self._holders.get
        return lambda digest: get(digest, 0) & workers == workers

    def _holders_of(self, hashes: Sequence[bytes], block: int) -> int:
        return self._holders.get(hashes[block], 0) if block < len(hashes) else 0


STEP_TOKENS = 4
MAX_HEADS = 1 << 13  # for some thousand requests

BlockHead = tuple[bytes, tuple[int, ...]]
"""Hash of the previous block (or the salt), and the first tokens of a block."""


def block_head_keys(parent: bytes, tokens: Sequence[int]) -> list[BlockHead]:
    """Return the heads of a block or part of it, the longest first, in steps."""
    longest = len(tokens) - len(tokens) % STEP_TOKENS
    return [(parent, tuple(tokens[:length])) for length in range(longest, 0, -STEP_TOKENS)]


class BlockHeadIndex:
    """Head of a block → workers as bits of an integer.

    A worker copies what two blocks have in common (kv.share_partial_blocks), but hashes cover whole
    blocks. For each request the block is recorded in which it leaves the cached blocks, since its
    next sibling leaves them there too. The oldest entries are dropped. An entry may be outdated, so
    it only decides between workers with equally many blocks.
    """

    def __init__(self) -> None:
        self._workers: dict[BlockHead, int] = {}

    def shared_tokens(self, heads: Sequence[BlockHead]) -> dict[int, int]:
        """Return the tokens of the longest known head, by worker."""
        found: dict[int, int] = {}
        for head in reversed(heads):
            workers = self._workers.get(head, 0)
            if not workers:
                break
            while workers:
                worker = workers.bit_length() - 1
                found[worker] = len(head[1])
                workers ^= 1 << worker
        return found

    def note(self, worker: int, heads: Sequence[BlockHead]) -> None:
        known = self._workers
        for head in heads:
            known[head] = known.pop(head, 0) | 1 << worker
        while len(known) > MAX_HEADS:
            del known[next(iter(known))]
