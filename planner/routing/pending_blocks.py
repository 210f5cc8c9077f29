"""Chains of blocks that open requests will leave in workers' caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        while low < high:
            middle = (low + high) // 2
            if known[middle] == hashes[middle]:
                low = middle + 1
            else:
                high = middle
        return low


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
        """Remove all chains of a worker."""
        for run in list(self._runs.values()):
            if worker in run.workers:
                self._drop(run, worker)

    def match(self, worker: int, hashes: Hashes) -> int:
        """Return the number of leading blocks of `hashes` that are pending at a worker."""
        blocks = 0
        for run, end in self._along(hashes):
            if worker not in run.workers:
                break
            blocks = end
        return blocks

    def matches(self, hashes: Hashes) -> dict[int, int]:
        """Return the matches of all workers that have any."""
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
