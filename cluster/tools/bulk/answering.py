"""Answers to chunks of rows.

Classification takes one tokenizer call for a chunk, then one scorer call per row. Each row to
generate from or to score is a request of this process to its own application.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

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
from cluster.http.app import App
from cluster.http.response_types import TokenUsage
from cluster.http.row_client import (
    LOST_CODES,
    MAX_FAILURES,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    RowClient,
    RowReply,
)
from cluster.tools.bulk.job import BulkJob, RequestTask
from cluster.tools.bulk.records import GeneratedRow, RowAnswer, RowOutcome, RowRejection, RowRequest
from contracts.clock import monotonic_s
from contracts.errors import RequestError, TandemError
from contracts.requests import Caller, add_usage
from models.text.tokenizer import Tokenizer


class _Choice(msgspec.Struct):
    finish_reason: str
    text: str | None = None
    message: dict[str, Any] = {}


class _Reply(msgspec.Struct):
    usage: TokenUsage
    choices: list[_Choice] = []
    scores: list[list[float]] = []


_decode_reply = msgspec.json.Decoder(_Reply).decode


class RowRequester:
    """Answers chunks of rows by requests to `app`.

    is_chat: prompts are messages of a chat. unavailable_s: limit without any answer.
    """

    def __init__(self, app: App, task: RequestTask, *, is_chat: bool, unavailable_s: float) -> None:
        self._client, self._task, self._unavailable_s = RowClient(app), task, unavailable_s
        self._is_chat = is_chat
        self._fields = {"model": app.app_state.model.name, **task.fields}
        self._path = "/v1/score"
        if task.kind == "generate":
            self._path = "/v1/chat/completions" if is_chat else "/v1/completions"

    async def answer(self, rows: Sequence[RowRequest]) -> list[RowOutcome]:
        """Answer the rows. Raises NotReadyError after `unavailable_s` without any answer."""
        return list(await asyncio.gather(*map(self._row, rows)))

    async def _row(self, row: RowRequest) -> RowOutcome:
        body = msgspec.json.encode(self._body(row))
        reply = await self._client.answer(self._path, body, Caller(), self._unavailable_s)
        if reply.status != 200:
            attempts = f" [tried {reply.attempts} times]" if reply.attempts > 1 else ""
            return RowRejection(reply.error.message + attempts)
        return self._outcome(reply)

    def _body(self, row: RowRequest) -> dict[str, Any]:
        if self._task.kind == "score":
            return {"query": row.prefix, "items": [row.text], **self._fields}
        prompt = self._task.prompt(row.prefix, row.text)
        if self._is_chat:
            return {"messages": [{"role": "user", "content": prompt}], **self._fields}
        return {"prompt": prompt, **self._fields}

    def _outcome(self, reply: RowReply) -> RowOutcome:
        found = _decode_reply(reply.body)
        usage, cached = found.usage, found.usage.prompt_tokens_details.cached_tokens
        if self._task.kind == "score":
            return RowAnswer(found.scores[0], usage.prompt_tokens, cached)
        choice = found.choices[0]
        text = choice.text if choice.text is not None else choice.message.get("content") or ""
        if self._task.is_json and choice.finish_reason == "length":
            return RowRejection(
                f"the answer is cut after {usage.completion_tokens} tokens and no complete JSON: "
                "increase --max-tokens"
            )
        tokens = usage.prompt_tokens, cached, usage.completion_tokens
        return GeneratedRow(text, choice.finish_reason, *tokens)


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
