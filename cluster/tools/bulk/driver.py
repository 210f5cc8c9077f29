"""Driver of a bulk job: reads windows, sends rows, commits windows.

    read      | window 2 |          | window 3 |
    send      | window 1 .......... | window 2 ...........
    commit            | window 0 |          | window 1 |

Two windows are open at a time, so that the last rows of one do not leave workers idle.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import msgspec

from cluster.classification.classify import ClassifyTask, applicable_labels, render_prompt
from cluster.tools.bulk.journal import Committed, Journal
from cluster.tools.bulk.output import Output
from cluster.tools.bulk.progress import RowTally
from cluster.tools.bulk.records import (
    GeneratedRow,
    InputRow,
    Reject,
    RowAnswer,
    RowOutcome,
    RowRejection,
    RowRequest,
)
from cluster.tools.bulk.requester import RequestTask
from cluster.tools.bulk.windows import Window, split_chunks
from contracts.clock import Clock, monotonic_s
from contracts.errors import JobError, first_error

IN_FLIGHT_ROWS = 512
CHUNK_ROWS = 64
CHUNK_REQUESTS = 8
CHUNK_CHARACTERS = 1 << 20
SYNC_EVERY_S = 1.0
PROB_DIGITS = 7  # logits of two runs differ by up to 1e-5


class RouterLostError(JobError):
    """The router was lost with these rows; another one can answer them."""


class RowRouter(Protocol):
    async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
        """Return an outcome per row. Raises RouterLostError, or JobError if a retry cannot help."""


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    task: ClassifyTask
    multi_label: bool = False
    requests: RequestTask | None = None
    in_flight_rows: int = IN_FLIGHT_ROWS

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, which is answered when its slowest row is."""
        most = CHUNK_ROWS if self.requests is None else CHUNK_REQUESTS
        return max(1, min(most, self.in_flight_rows // 2))

    def prompt(self, row: InputRow) -> str:
        """Return the row's prompt, or what of it determines common prefixes."""
        if self.requests is not None:
            return self.requests.prompt(row.prefix, row.text)
        return render_prompt(msgspec.structs.replace(self.task, prefix=row.prefix), row.text)

    def line(self, row: InputRow, answer: RowAnswer | GeneratedRow) -> dict[str, Any]:
        """Return the row's line of the part file."""
        if isinstance(answer, GeneratedRow):
            is_json = self.requests is not None and self.requests.is_json
            return {
                "id": row.id,
                **(
                    {"json": msgspec.Raw(answer.text.encode())}
                    if is_json
                    else {"text": answer.text}
                ),
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
            }
        probs = [float(f"{prob:.{PROB_DIGITS}g}") for prob in answer.probs]
        if self.requests is not None:
            return {"id": row.id, "scores": probs, "prompt_tokens": answer.prompt_tokens}
        labels = self.task.labels
        best = max(range(len(probs)), key=answer.probs.__getitem__)
        label = applicable_labels(labels, answer.probs) if self.multi_label else labels[best]
        tokens = {"prompt_tokens": answer.prompt_tokens}
        return {"id": row.id, "label": label, "probs": probs, **tokens}


class Driver:
    """Driver of one run. Belongs to one event loop."""

    def __init__(
        self,
        output: Output,
        router: RowRouter,
        settings: DriverSettings,
        tally: RowTally,
        clock: Clock = monotonic_s,
    ) -> None:
        self._output, self._router, self._settings = output, router, settings
        self._tally, self._clock = tally, clock
        self._slots = asyncio.Semaphore(max(1, settings.in_flight_rows // settings.chunk_rows))
        self._committed_s = clock()
        self._synced_s = clock()

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
        settings = self._settings
        chunks = split_chunks(
            window, missing, settings.prompt, settings.chunk_rows, CHUNK_CHARACTERS
        )
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
        if self._clock() - self._synced_s > SYNC_EVERY_S:
            self._synced_s = self._clock()
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
        now_s = self._clock()
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
                yield encode(self._settings.line(row, answer)) + b"\n"


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
