"""Generation and scoring of rows: each is a request of this process to its own application."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from cluster.classification.classify import fill_template
from cluster.http.app import App
from cluster.http.response_types import TokenUsage
from cluster.http.row_client import RowClient, RowReply
from cluster.tools.bulk.records import GeneratedRow, RowAnswer, RowOutcome, RowRejection, RowRequest
from contracts.requests import Caller

MAX_TOKENS = 256  # of an answer, by default


class RequestTask(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a job's rows.

    template: of the prompt to generate from. fields: added to each body. is_json: the answer must
    be complete JSON.
    """

    kind: Literal["generate", "score"]
    template: str = "{text}"
    fields: dict[str, Any] = {}
    is_json: bool = False

    def prompt(self, prefix: str, text: str) -> str:
        return fill_template(self.template, {"prefix": prefix, "text": text})


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
