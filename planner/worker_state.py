"""What a worker's log amounts to: the same on every router, and on the worker itself.

    log        report 0, report 1, …        (contracts/routing.py)
    committed  hashes of blocks in its prefix cache
    pending    hashes that its open requests will fill
    load       work of its open requests

A state is a fold over the log, and depends on nothing else. So routers that have folded the same
reports agree, in whatever order the reports of different workers reached them.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.routing import Calibration, Prompt, WorkerReport, WorkerSnapshot
from planner.open_requests import OpenRequests
from planner.request_work import RequestWork


class MissingReportsError(Exception):
    """A report came before one that it builds on: ask the worker for a snapshot."""


class WorkerState:
    """One worker, as its reports tell."""

    def __init__(self, work: RequestWork, block_tokens: int) -> None:
        self.present = True
        self._work = work
        self._block_tokens = block_tokens
        self._closed_epoch = -1  # reports of it and of older ones are late, and mean nothing
        self._clear(-1)

    def _clear(self, epoch: int) -> None:
        self.epoch, self.number = epoch, -1
        self.calibration: Calibration | None = None
        self.requests = OpenRequests(self._work)
        self._committed: dict[bytes, None] = {}  # in order of storing, so that copies are equal

    def holds(self, digest: bytes) -> bool:
        return digest in self._committed or self.requests.promises(digest)

    def committed(self) -> tuple[bytes, ...]:
        return tuple(self._committed)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are committed or pending."""
        for blocks, digest in enumerate(hashes):
            if not self.holds(digest):
                return blocks
        return len(hashes)

    def apply(self, report: WorkerReport) -> list[bytes]:
        """Folds the next report. Returns the hashes that it touched: held now, or no longer.

        One that was folded before changes nothing. Raises MissingReportsError where one is left
        out (nothing is folded then), and ValueError for a report that contradicts the log before
        it: such a worker is to be given up with `lose`.
        """
        if self._is_old(report.epoch, report.number):
            return []
        if self.number == -1 and report.number == 0:
            self.epoch = report.epoch
        if (report.epoch, report.number) != (self.epoch, self.number + 1):
            raise MissingReportsError(
                f"worker {report.worker}: report {report.epoch}.{report.number} follows "
                f"{self.epoch}.{self.number}: restore a snapshot"
            )
        self.present = True
        self.number = report.number
        if report.calibration is not None:
            self.calibration = report.calibration
        return [*self._follow_requests(report), *self._follow_cache(report), *self._end(report)]

    def _is_old(self, epoch: int, number: int) -> bool:
        return epoch <= self._closed_epoch or (epoch, number) <= (self.epoch, self.number)

    def _follow_requests(self, report: WorkerReport) -> list[bytes]:
        touched: list[bytes] = []
        for prompt in report.accepted:
            blocks = self.match(prompt.hashes)
            done_tokens = usable_tokens(prompt, blocks, self._block_tokens)
            self.requests.open(prompt, done_tokens)
            touched += prompt.hashes[blocks:]
        for progress in report.progress:
            self.requests.advance(progress.key, progress.done_tokens)
        return touched

    def _follow_cache(self, report: WorkerReport) -> list[bytes]:
        for digest in report.stored:
            self._committed[digest] = None
        for digest in report.evicted:
            self._committed.pop(digest, None)
        return [*report.stored, *report.evicted]

    def _end(self, report: WorkerReport) -> list[bytes]:
        return [digest for key in report.ended for digest in self.requests.close(key)]

    def lose(self) -> list[bytes]:
        """The worker is gone with all it held, until report 0 or a snapshot of a later epoch.
        Returns what it touched."""
        self._closed_epoch = max(self._closed_epoch, self.epoch)
        return self.forget()

    def forget(self) -> list[bytes]:
        """The worker cannot be heard: nothing is known of it until a snapshot, of whatever epoch
        that is not closed. Returns what it touched."""
        touched = [*self._committed, *self.requests.promised()]
        self._clear(-1)
        self.present = False
        return touched

    def snapshot(self, worker: int) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker=worker,
            epoch=self.epoch,
            number=self.number,
            calibration=self.calibration,
            committed=self.committed(),
            requests=tuple(self.requests.entries()),
        )

    def restore(self, snapshot: WorkerSnapshot) -> list[bytes]:
        """Takes the place of all reports up to the snapshot's. Returns what it touched."""
        if self._is_old(snapshot.epoch, snapshot.number):
            return []
        touched = [*self._committed, *self.requests.promised()]
        self._clear(snapshot.epoch)
        self.present = True
        self.number, self.calibration = snapshot.number, snapshot.calibration
        self._committed = dict.fromkeys(snapshot.committed)
        for request in snapshot.requests:
            self.requests.add(request)
        return [*touched, *self._committed, *self.requests.promised()]


def usable_tokens(prompt: Prompt, blocks: int, block_tokens: int) -> int:
    """Tokens that `blocks` matched blocks save: never all, for the answer needs the last one."""
    return min(blocks, (prompt.prompt_tokens - 1) // block_tokens) * block_tokens
