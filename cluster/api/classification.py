"""`POST /v1/classify`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import header, json_response, prefill_usage
from cluster.api.body import read_body
from cluster.api.callers import salted
from cluster.api.checks import check_model, check_priority
from cluster.api.schemas import ClassifyBody
from cluster.api.session import Services, Session
from cluster.bounded import map_bounded
from cluster.classify import (
    DEFAULT_TEMPLATE,
    Classified,
    ClassifyTask,
    Row,
    check_task,
    classify_row,
    tokenize_row,
    tokenize_rows,
)
from cluster.multilabel import YES, applying, check_questions, questions
from contracts.errors import RequestError
from contracts.metrics import Pipeline
from contracts.requests import Priority

CONCURRENT_ROWS = 256  # of one request; the rest wait their turn here
TOKENIZED_AT_ONCE = 64
MAX_LABELS = 256


async def classify(services: Services, session: Session, request: Request) -> Response:
    session.pipeline = Pipeline.PREFILL
    body = await session.read(read_body(request, ClassifyBody, services.http.max_body_bytes))
    session.caller = salted(session.caller, body.cache_salt)
    texts, task = _checked(services, body)
    session.priority = task.priority
    tasks = questions(task) if body.multi_label else [task]
    asked = [(text, each) for text in texts for each in tasks]
    results = await session.run(_run(services, session, asked))
    rows = _multi_rows(task, results) if body.multi_label else _rows(task, results)
    return json_response(
        {
            **header("classify", "list", services.model.name),
            "data": rows,
            "usage": prefill_usage(result.usage for result in results),
        }
    )


def _checked(services: Services, body: ClassifyBody) -> tuple[list[str], ClassifyTask]:
    check_model(body.model, services.model)
    if len(body.labels) > MAX_LABELS:
        raise RequestError(f"labels: {len(body.labels)} are more than {MAX_LABELS}", "labels")
    task = ClassifyTask(
        labels=tuple(body.labels),
        prefix=body.prefix or "",
        template=DEFAULT_TEMPLATE if body.template is None else body.template,
        priority=check_priority(body.priority, default=Priority.LS),
        max_context_tokens=services.model.max_context_tokens,
    )
    check_task(task)
    if body.multi_label:
        check_questions(task)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise RequestError("input is empty", "input")
    limit = services.http.max_batch_items
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


async def _run(
    services: Services, session: Session, asked: list[tuple[str, ClassifyTask]]
) -> list[Classified]:
    """All texts are tokenised, and so checked, before the first one is sent to a rank."""

    async def classified(numbered: tuple[int, Row]) -> Classified:
        index, row = numbered
        patient = index > 0  # the first row is what the request is admitted or refused with
        row = msgspec.structs.replace(row, patient=patient)
        result = await classify_row(services.backend, asked[index][1], row)
        session.on_token()
        session.on_sequence_end(result.usage, 0.0, 0.0)
        return result

    rows = await _tokenized(services, asked)
    return await map_bounded(classified, enumerate(rows), CONCURRENT_ROWS)


async def _tokenized(services: Services, asked: list[tuple[str, ClassifyTask]]) -> list[Row]:
    """A few in a thread at a time, so that other requests go on meanwhile."""
    if len(asked) == 1:
        ((text, task),) = asked
        return [await tokenize_row(services.tokenizer, task, text)]
    rows: list[Row] = []
    for start in range(0, len(asked), TOKENIZED_AT_ONCE):
        some = asked[start : start + TOKENIZED_AT_ONCE]
        for row in await asyncio.to_thread(tokenize_rows, services.tokenizer, some):
            if isinstance(row, RequestError):
                raise row
            rows.append(row)
    return rows


def _rows(task: ClassifyTask, results: list[Classified]) -> list[dict[str, Any]]:
    return [
        _row(index, task, task.labels[result.best], result.probs)
        for index, result in enumerate(results)
    ]


def _multi_rows(task: ClassifyTask, results: list[Classified]) -> list[dict[str, Any]]:
    """results: for each text one per label."""
    count = len(task.labels)
    rows = []
    for index in range(len(results) // count):
        probs = [result.probs[YES] for result in results[index * count : (index + 1) * count]]
        rows.append(_row(index, task, applying(task.labels, probs), probs))
    return rows


def _row(
    index: int, task: ClassifyTask, label: str | list[str], probs: list[float]
) -> dict[str, Any]:
    return {"index": index, "label": label, "probs": probs, "num_classes": len(task.labels)}
