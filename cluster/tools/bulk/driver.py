"""Driver of a bulk job: reads windows, sends rows, commits windows.

    read      | window 2 |          | window 3 |
    send      | window 1 .......... | window 2 ...........
    commit            | window 0 |          | window 1 |

Two windows are open at a time, so that the last rows of one do not leave workers idle.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import msgspec

from cluster.tools.bulk.job import BulkJob
from cluster.tools.bulk.output import Committed, Journal, Output
from cluster.tools.bulk.progress import RowTally
from cluster.tools.bulk.records import (
    Reject,
    RowOutcome,
    RowRejection,
    RowRequest,
    Window,
    split_chunks,
)
from contracts.clock import monotonic_s
from contracts.errors import JobError, first_error

CHUNK_CHARACTERS = 1 << 20
SYNC_EVERY_S = 1.0


class RouterLostError(JobError):
    """The router was lost with these rows; another one can answer them."""


class RowRouter(Protocol):
    async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
        """Return an outcome per row. Raises RouterLostError, or JobError if a retry cannot help."""


class Driver:
    """Driver of one run. Belongs to one event loop."""

    def __init__(self, output: Output, router: RowRouter, job: BulkJob, tally: RowTally) -> None:
        self._output, self._router, self._job = output, router, job
        self._tally = tally
        self._slots = asyncio.Semaphore(max(1, job.most_in_flight // job.chunk_rows))
        self._committed_s = self._synced_s = monotonic_s()

    async def run(self, windows: Iterator[Window]) -> None:
        """Commit all windows. Raises TandemError; committed windows remain."""
        for line in self._output.committed:
            rows = line.rows_ok + line.rows_rejected
            self._tally.found(rows, line.prompt_tokens, line.cached_tokens)
        try:
            async with asyncio.TaskGroup() as group:
                commits: list[asyncio.Task[None]] = []
                async for window in _read_ahead(windows):
                    if window.number < len(self._output.committed):
                        await asyncio.to_thread(self._output.check_unchanged, window)
                        continue
                    for commit in commits[:-1]:
                        await commit
                    before = commits[-1:]
                    commits = [*before, await self._start(group, window, before)]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _start(
        self, group: asyncio.TaskGroup, window: Window, before: list[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        """Send all rows of the window; return the task that commits it."""
        journal = await asyncio.to_thread(self._output.journal, window)
        self._tally.rejected(len(window.rejects))
        self._tally.found(len(journal.answers), *_tokens(list(journal.answers.values())))
        missing = [row for row in range(len(window.rows)) if row not in journal.answers]
        job = self._job
        chunks = split_chunks(window, missing, job.prompt, job.chunk_rows, CHUNK_CHARACTERS)
        sent = []
        for chunk in chunks:
            await self._slots.acquire()
            sent.append(group.create_task(self._send(window, journal, chunk)))
        return group.create_task(self._commit(window, journal, [*sent, *before]))

    async def _send(self, window: Window, journal: Journal, chunk: list[int]) -> None:
        rows = [RowRequest(window.rows[row].prefix, window.rows[row].text) for row in chunk]
        try:
            while True:
                journal.sending(len(chunk))
                try:
                    answers = await self._router.answer(rows)
                    break
                except RouterLostError:
                    continue
        finally:
            self._slots.release()
        journal.add(list(zip(chunk, answers, strict=True)))
        self._tally.done(answers)
        if monotonic_s() - self._synced_s > SYNC_EVERY_S:
            self._synced_s = monotonic_s()
            await asyncio.to_thread(journal.sync)

    async def _commit(
        self, window: Window, journal: Journal, first: list[asyncio.Task[None]]
    ) -> None:
        await asyncio.gather(*first)
        journal.close()
        answers = [journal.answers[row] for row in range(len(window.rows))]
        refused = [
            Reject(row.id, row.place, answer.reason)
            for row, answer in zip(window.rows, answers, strict=True)
            if isinstance(answer, RowRejection)
        ]
        rejects = [*window.rejects, *refused]
        prompt_tokens, cached_tokens = _tokens(answers)
        now_s = monotonic_s()
        done = Committed(
            window=window.number,
            digest=window.digest,
            rows_ok=len(answers) - len(refused),
            rows_rejected=len(rejects),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            rows_sent_again=max(0, journal.sends - len(answers)),
            seconds=now_s - self._committed_s,
        )
        self._committed_s = now_s
        lines = self._lines(window, answers)
        await asyncio.to_thread(self._output.commit, done, lines, rejects)

    def _lines(self, window: Window, answers: list[RowOutcome]) -> Iterator[bytes]:
        """Yield the lines of the part file."""
        encode = msgspec.json.Encoder().encode
        for row, answer in zip(window.rows, answers, strict=True):
            if not isinstance(answer, RowRejection):
                yield encode(self._job.line(row, answer)) + b"\n"


async def _read_ahead(windows: Iterator[Window]) -> AsyncIterator[Window]:
    """Yield the windows; a thread reads the next one meanwhile."""

    def read() -> Window | None:
        return next(windows, None)

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        while (window := await reading) is not None:
            reading = asyncio.create_task(asyncio.to_thread(read))
            yield window
    finally:
        reading.cancel()


def _tokens(answers: list[RowOutcome]) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of cached ones."""
    counted = [answer for answer in answers if not isinstance(answer, RowRejection)]
    return sum(a.prompt_tokens for a in counted), sum(a.cached_tokens for a in counted)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = first_error(errors)
    if isinstance(error, OSError):  # readers handle errors of the input
        where = error.filename or "the output folder"
        return JobError(f"{where}: cannot be written: {error.strerror}; then run with --resume")
    return error
