"""`POST /v1/classify`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.classification.bounded import map_bounded
from cluster.classification.classify import (
    DEFAULT_TEMPLATE,
    Classified,
    ClassifyTask,
    TokenizedRow,
    check_task,
    classify_row,
    count_placeholders,
    prompt_characters,
    tokenize_steps,
)
from cluster.classification.multilabel import YES, applicable_labels, check_questions, label_tasks
from cluster.http.authenticator import with_cache_salt
from cluster.http.body import read_request_body
from cluster.http.checks import check_model, check_priority
from cluster.http.cost import VALUE_BYTES, classified_answer_bytes
from cluster.http.request_context import AppState, RequestContext
from cluster.http.response_types import ClassifiedRow
from cluster.http.responses import (
    Json,
    json_list,
    json_object,
    pieces_response,
    response_fields,
    token_usage,
)
from cluster.http.schemas import ClassifyBody
from contracts.errors import RequestError
from contracts.metrics import Pipeline
from contracts.requests import Priority

CONCURRENT_ROWS = 256  # of one pass each, of one request; the rest wait their turn here
ENCODED_AT_ONCE = 128


async def classify(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.pipeline = Pipeline.PREFILL
    body = await read_request_body(app_state, ctx, request, ClassifyBody)
    ctx.caller = with_cache_salt(ctx.caller, body.cache_salt)
    ctx.set_priority(check_priority(body, default=ctx.priority))
    texts, task = _checked(app_state, body, ctx.priority)
    tasks = label_tasks(task) if body.multi_label else [task]
    inputs = [(text, each) for text in texts for each in tasks]
    multi_label = bool(body.multi_label)
    characters = _check_cost(app_state, inputs, texts, task, multi_label=multi_label)
    results = await ctx.run(_run(app_state, ctx, inputs, characters))
    rows = _multi_rows(task, results) if multi_label else _rows(task, results)
    usage = token_usage(result.usage for result in results)
    head = {**response_fields("classify", "list", app_state.model.name), "usage": usage}
    return pieces_response(json_object(head, {"data": await _encoded(rows, ctx)}))


def _checked(
    app_state: AppState, body: ClassifyBody, priority: Priority
) -> tuple[list[str], ClassifyTask]:
    check_model(body.model, app_state.model)
    template = DEFAULT_TEMPLATE if body.template is None else body.template
    task = ClassifyTask(
        labels=tuple(body.labels),
        prefix=body.prefix or "",
        template=template,
        priority=priority,
        max_context_tokens=app_state.model.max_context_tokens,
        max_label_tokens=app_state.bounds.limits.label_tokens,
        placeholders=count_placeholders(template),
    )
    check_task(task)
    if body.multi_label:
        check_questions(task)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise RequestError("input is empty", "input")
    limit = app_state.http.max_batch_items
    if len(texts) > limit:
        raise RequestError(
            f"input: {len(texts)} texts are more than {limit} (http.max_batch_items)", "input"
        )
    if body.multi_label and len(texts) * len(task.labels) > limit:
        raise RequestError(
            f"input: {len(texts)} texts times {len(task.labels)} labels are more than {limit}"
            " (http.max_batch_items)",
            "input",
        )
    for index, text in enumerate(texts):
        if not text:
            raise RequestError(f"input[{index}] is empty", "input")
    return texts, task


def _check_cost(
    app_state: AppState,
    inputs: list[tuple[str, ClassifyTask]],
    texts: list[str],
    task: ClassifyTask,
    *,
    multi_label: bool,
) -> int:
    """What can be told before a template is filled: its characters, of which no token has more than
    the longest. Returns about how many go through the tokenizer. Raises TooLongError,
    TooCostlyError."""
    bounds = app_state.bounds
    bounds.check_labels(task.labels)
    characters = 0
    for text, each in inputs:
        filled = prompt_characters(each, text)
        bounds.check_text("input" if filled <= 2 * len(text) else "template", filled)
        characters += filled
    bounds.check_passes("input", len(inputs), characters // bounds.token_characters)
    size = classified_answer_bytes(len(texts), task.labels, multi_label=multi_label)
    bounds.check_answer("labels", size)
    answers = inputs[0][1].answers
    return characters * (len(answers) + 1) + len(inputs) * sum(map(len, answers))


class _Rows:
    """The rows of a request as they are tokenised, counted on the way."""

    def __init__(self, app_state: AppState) -> None:
        self._bounds = app_state.bounds
        self._passes = self._tokens = 0
        self.rows: list[TokenizedRow] = []

    def add(self, row: TokenizedRow | RequestError) -> None:
        """Raises it if it is an error, or TooCostlyError."""
        if isinstance(row, RequestError):
            raise row
        self.rows.append(row)
        passes = row.labels.passes
        self._passes += len(passes)
        self._tokens += len(passes) * len(row.prompt_ids) + sum(each.length for each in passes)
        self._bounds.check_passes("input", self._passes, self._tokens)

    @property
    def at_once(self) -> int:
        """How many may be on their way, so that about CONCURRENT_ROWS passes are."""
        most = max(len(row.labels.passes) for row in self.rows)
        return max(1, CONCURRENT_ROWS // most)


async def _run(
    app_state: AppState,
    ctx: RequestContext,
    inputs: list[tuple[str, ClassifyTask]],
    characters: int,
) -> list[Classified]:
    """All texts are tokenised, and so checked, before the first one is sent to a rank."""

    async def classified(numbered: tuple[int, TokenizedRow]) -> Classified:
        index, row = numbered
        wait_for_slot = index > 0  # the first row is what the request is admitted or refused with
        row = msgspec.structs.replace(row, wait_for_slot=wait_for_slot, caller=ctx.caller)
        result = await classify_row(app_state.backend, inputs[index][1], row)
        ctx.account.grow(len(result.probs) * VALUE_BYTES)
        ctx.on_token()
        ctx.on_sequence_end(result.usage, 0.0, 0.0)
        return result

    rows = _Rows(app_state)
    steps = tokenize_steps(app_state.tokenizer, inputs, rows.add)
    await app_state.tokenizer_pool.run(steps, characters, ctx.charge_tokens, ctx.priority)
    return await map_bounded(classified, enumerate(rows.rows), rows.at_once)


def _rows(task: ClassifyTask, results: list[Classified]) -> Iterator[ClassifiedRow]:
    for index, result in enumerate(results):
        yield _row(index, task, task.labels[result.best], result.probs)


def _multi_rows(task: ClassifyTask, results: list[Classified]) -> Iterator[ClassifiedRow]:
    """results: for each text one per label."""
    count = len(task.labels)
    for index in range(len(results) // count):
        probs = [result.probs[YES] for result in results[index * count : (index + 1) * count]]
        yield _row(index, task, applicable_labels(task.labels, probs), probs)


async def _encoded(rows: Iterator[ClassifiedRow], ctx: RequestContext) -> Json:
    """A few at a time: others get their turn in between."""
    pieces: Json = []
    while some := list(itertools.islice(rows, ENCODED_AT_ONCE)):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(msgspec.json.encode(some)[1:-1])
        ctx.account.grow(len(pieces[-1]))
    return json_list([piece] for piece in pieces)


def _row(
    index: int, task: ClassifyTask, label: str | list[str], probs: list[float]
) -> ClassifiedRow:
    return ClassifiedRow(index=index, label=label, probs=probs, num_classes=len(task.labels))
