"""Classification of chunks of rows: one tokenizer call, then one scorer call per row."""

import asyncio
from collections.abc import Sequence

import msgspec

from cluster.classification.classify import (
    YES,
    Classified,
    ClassifyTask,
    Scorer,
    TokenizedRow,
    classify_row,
    label_tasks,
    map_bounded,
    tokenize_rows,
)
from cluster.http.row_client import LOST_CODES, MAX_FAILURES, MAX_PAUSE_S, MIN_PAUSE_S
from cluster.tools.bulk.job import BulkJob
from cluster.tools.bulk.records import RowAnswer, RowOutcome, RowRejection, RowRequest
from contracts.clock import monotonic_s
from contracts.errors import RequestError, TandemError
from contracts.requests import add_usage
from models.text.tokenizer import Tokenizer


class RowClassifier:
    """Classifier of chunks, several at once. Belongs to one event loop."""

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, job: BulkJob, max_context_tokens: int
    ) -> None:
        self._scorer, self._tokenizer, self._job = scorer, tokenizer, job
        self._task = job.task(max_context_tokens)
        self._last_answer_s = monotonic_s()

    async def answer(self, rows: Sequence[RowRequest]) -> list[RowOutcome]:
        """Classify the rows.

        Raises the last TandemError after `unavailable_s` without any answer.
        """
        passes = [pair for row in rows for pair in self._questions(row)]
        tokenized = await asyncio.to_thread(tokenize_rows, self._tokenizer, passes)
        per_row = len(passes) // len(rows)

        async def one(number: int) -> RowOutcome:
            first = number * per_row
            parts = tokenized[first : first + per_row]
            tasks = [task for _, task in passes[first : first + per_row]]
            return await self._row(tasks, parts)

        return await map_bounded(one, range(len(rows)), limit=len(rows))

    def _questions(self, row: RowRequest) -> list[tuple[str, ClassifyTask]]:
        task = msgspec.structs.replace(self._task, prefix=row.prefix)
        tasks = label_tasks(task) if self._job.multi_label else [task]
        return [(row.text, each) for each in tasks]

    async def _row(
        self, tasks: Sequence[ClassifyTask], parts: Sequence[TokenizedRow | RequestError]
    ) -> RowOutcome:
        results: list[Classified] = []
        for task, part in zip(tasks, parts, strict=True):
            if isinstance(part, RequestError):
                return RowRejection(part.message)
            part = msgspec.structs.replace(part, wait_for_slot=True)
            result = await self._classify_with_retry(task, part)
            if isinstance(result, RowRejection):
                return result
            results.append(result)
        usage = add_usage([result.usage for result in results])
        probs = [r.probs[YES] for r in results] if self._job.multi_label else results[0].probs
        return RowAnswer(probs, usage.prompt_tokens, usage.cached_tokens)

    async def _classify_with_retry(
        self, task: ClassifyTask, row: TokenizedRow
    ) -> Classified | RowRejection:
        """Classify a row; retry after lost workers and full queues.

        Raises the last error after `unavailable_s` without any answer.
        """
        pause_s = MIN_PAUSE_S
        failures = 0
        while True:
            try:
                result = await classify_row(self._scorer, task, row)
                self._last_answer_s = monotonic_s()
                return result
            except TandemError as error:
                if not error.retryable or error.code in LOST_CODES:
                    failures += 1
                if error.status < 500 and not error.retryable:
                    return RowRejection(error.message)
                if failures >= MAX_FAILURES:
                    return RowRejection(f"{error.message} [tried {failures} times]")
                if monotonic_s() - self._last_answer_s > self._job.unavailable_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
