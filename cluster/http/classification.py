"""`POST /v1/classify` and `POST /v1/score`.

/v1/score returns how likely each of a few tokens is to come next, for many items. A prompt is the
query followed by an item (`item_first`: the reverse). The scores are probabilities over the whole
vocabulary, or with `apply_softmax` among the labels only.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.classification.classify import (
    DEFAULT_TEMPLATE,
    YES,
    Classified,
    ClassifyTask,
    TokenizedRow,
    applicable_labels,
    check_questions,
    check_task,
    checked_scores,
    classify_row,
    count_placeholders,
    label_tasks,
    map_bounded,
    prompt_characters,
    softmax,
    tokenize_steps,
)
from cluster.http.body import check_model, check_tokens, read_prioritized_body
from cluster.http.cost import (
    ANSWER_NUMBER_BYTES,
    SHARED_TOKEN_BYTES,
    VALUE_BYTES,
    Bounds,
    classified_answer_bytes,
)
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
from cluster.http.schemas import ClassifyBody, ScoreBody
from contracts.errors import RequestError, TooLongError
from contracts.messages import Scored, Submit
from contracts.metrics import Pipeline
from contracts.requests import Priority, Usage

CONCURRENT_ROWS = 256  # per request, with one pass each
ENCODED_AT_ONCE = 128
CONCURRENT_ITEMS = 256  # per request
SCORES_AT_ONCE = 1 << 14


async def classify(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.pipeline = Pipeline.PREFILL
    body = await read_prioritized_body(app_state, ctx, request, ClassifyBody)
    texts, task = _checked(app_state, body, ctx.priority)
    tasks = label_tasks(task) if body.multi_label else [task]
    inputs = [(text, each) for text in texts for each in tasks]
    multi_label = bool(body.multi_label)
    characters = _check_cost(app_state, inputs, texts, task, multi_label=multi_label)
    results = await ctx.run(_run(app_state, ctx, inputs, characters))
    rows = _rows(task, results, multi_label=multi_label)
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
    return texts, task


def _check_cost(
    app_state: AppState,
    inputs: list[tuple[str, ClassifyTask]],
    texts: list[str],
    task: ClassifyTask,
    *,
    multi_label: bool,
) -> int:
    """Check lengths before templates are filled in. Return the approximate characters to tokenize.

    A token has at most as many characters as the longest. Raises TooLongError, TooCostlyError.
    """
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
    """The tokenized rows of a request, counted against the limits."""

    def __init__(self, app_state: AppState) -> None:
        self._bounds = app_state.bounds
        self._passes = self._tokens = 0
        self.rows: list[TokenizedRow] = []

    def add(self, row: TokenizedRow | RequestError) -> None:
        """Add a row. Raises it if it is an error, or TooCostlyError."""
        if isinstance(row, RequestError):
            raise row
        self.rows.append(row)
        passes = row.labels.passes
        self._passes += len(passes)
        self._tokens += len(passes) * len(row.prompt_ids) + sum(each.length for each in passes)
        self._bounds.check_passes("input", self._passes, self._tokens)

    @property
    def at_once(self) -> int:
        """Rows to run concurrently, for about CONCURRENT_ROWS passes."""
        most = max(len(row.labels.passes) for row in self.rows)
        return max(1, CONCURRENT_ROWS // most)


async def _run(
    app_state: AppState,
    ctx: RequestContext,
    inputs: list[tuple[str, ClassifyTask]],
    characters: int,
) -> list[Classified]:
    """Tokenize and check all texts, then send them to the ranks."""

    async def classified(numbered: tuple[int, TokenizedRow]) -> Classified:
        index, row = numbered
        wait_for_slot = index > 0  # the first row decides on admission
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


def _rows(
    task: ClassifyTask, results: list[Classified], *, multi_label: bool
) -> Iterator[ClassifiedRow]:
    """Yield one row per text. results: one per text, or with multi_label one per text and label."""
    count = len(task.labels)
    for index in range(len(results) // (count if multi_label else 1)):
        label: str | list[str]
        if multi_label:
            probs = [result.probs[YES] for result in results[index * count : (index + 1) * count]]
            label = applicable_labels(task.labels, probs)
        else:
            probs, label = results[index].probs, task.labels[results[index].best]
        yield ClassifiedRow(index=index, label=label, probs=probs, num_classes=count)


async def _encoded(rows: Iterator[ClassifiedRow], ctx: RequestContext) -> Json:
    """Encode the rows in slices, so that other requests can run in between."""
    pieces: Json = []
    while some := list(itertools.islice(rows, ENCODED_AT_ONCE)):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(msgspec.json.encode(some)[1:-1])
        ctx.account.grow(len(pieces[-1]))
    return json_list([piece] for piece in pieces)


async def score(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.pipeline = Pipeline.PREFILL
    body = await read_prioritized_body(app_state, ctx, request, ScoreBody)
    answers = await ctx.run(_run_scoring(app_state, ctx, body))
    usage = token_usage(usage for _, usage in answers)
    head = {**response_fields("score", "scoring", app_state.model.name), "usage": usage}
    scores = json_list([scores] for scores, _ in answers)
    return pieces_response(json_object(head, {"scores": scores}))


async def _checked_prompts(
    app_state: AppState, ctx: RequestContext, body: ScoreBody
) -> list[list[int]]:
    check_model(body.model, app_state.model)
    labels = body.label_token_ids
    check_tokens(labels, app_state.model, "label_token_ids")
    items = [body.items] if isinstance(body.items, str) else body.items
    limit = app_state.http.max_batch_items
    if not 1 <= len(items) <= limit:
        raise RequestError(
            f"items has {len(items)} entries, expected 1 to {limit} (http.max_batch_items)", "items"
        )
    app_state.bounds.check_answer("items", len(items) * len(labels) * ANSWER_NUMBER_BYTES)
    prompts = await _prompts(app_state, ctx, body, items)
    app_state.bounds.check_passes("items", len(prompts), sum(map(len, prompts)))
    for prompt in prompts:
        check_tokens(prompt, app_state.model, "items")
        context = app_state.model.max_context_tokens
        if len(prompt) > context:
            raise TooLongError(
                f"items: query and item have {len(prompt)} tokens, the model's context holds"
                f" {context}",
                "items",
            )
    return prompts


async def _prompts(
    app_state: AppState, ctx: RequestContext, body: ScoreBody, items: Sequence[str | list[int]]
) -> list[list[int]]:
    """Join query and items: texts before they are tokenized, token ids as they are.

    Both are counted first: the query is part of each prompt.
    """
    query, first = body.query, body.item_first
    texts = [item for item in items if isinstance(item, str)]
    lists = [item for item in items if isinstance(item, list)]
    if isinstance(query, str) and len(texts) == len(items):
        characters = _check_characters(app_state.bounds, query, texts)
        steps = app_state.tokenizer.encode_steps(
            (text + query if first else query + text for text in texts),
            param="items",
            max_tokens=app_state.bounds.context_tokens,
        )
        return await app_state.tokenizer_pool.run(
            steps, characters, ctx.charge_tokens, ctx.priority
        )
    if isinstance(query, list) and len(lists) == len(items):
        tokens = sum(len(query) + len(ids) for ids in lists)
        app_state.bounds.check_passes("items", len(lists), tokens)
        ctx.account.charge(tokens * SHARED_TOKEN_BYTES, "items")
        return [ids + query if first else query + ids for ids in lists]
    raise RequestError("query and items must all be texts, or all be lists of token ids", "items")


def _check_characters(bounds: Bounds, query: str, texts: Sequence[str]) -> int:
    """Check texts and return the characters of all prompts. Raises TooLongError, TooCostlyError."""
    characters = 0
    for text in texts:
        bounds.check_text("items", len(query) + len(text))
        characters += len(query) + len(text)
    bounds.check_passes("items", len(texts), characters // bounds.token_characters)
    return characters


async def _run_scoring(
    app_state: AppState, ctx: RequestContext, body: ScoreBody
) -> list[tuple[bytes, Usage]]:
    """Return the scores of each item as JSON, which takes less memory than objects."""
    prompts, labels = await _checked_prompts(app_state, ctx, body), body.label_token_ids

    async def run(numbered: tuple[int, list[int]]) -> tuple[bytes, Usage]:
        index, prompt = numbered
        submit = Submit(
            request_id=0,
            token_ids=prompt,
            sampling=None,
            priority=ctx.priority,
            candidates=labels,
            caller=ctx.caller,
        )
        scored = await app_state.backend.score(submit, wait_for_slot=index > 0)
        ctx.on_token()
        ctx.on_sequence_end(scored.usage, 0.0, 0.0)
        scores = msgspec.json.encode(_scores(scored, len(labels), softmaxed=body.apply_softmax))
        ctx.account.grow(len(scores))
        return scores, scored.usage

    # Bounds the encoding in one turn of the event loop: answers may arrive together.
    at_once = max(1, min(CONCURRENT_ITEMS, SCORES_AT_ONCE // len(labels)))
    return await map_bounded(run, enumerate(prompts), at_once)


def _scores(scored: Scored, count: int, *, softmaxed: bool) -> list[float]:
    if softmaxed:
        return softmax(checked_scores(scored.candidate_logits, count))
    return [math.exp(logprob) for logprob in checked_scores(scored.candidate_logprobs, count)]
