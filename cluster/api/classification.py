"""`POST /v1/classify`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import header, json_response, prefill_usage
from cluster.api.body import read_body
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
)
from contracts.errors import RequestError
from contracts.metrics import Pipeline
from contracts.requests import Priority

CONCURRENT_ROWS = 64
MAX_LABELS = 256


async def classify(services: Services, session: Session, request: Request) -> Response:
    session.pipeline = Pipeline.PREFILL
    body = await session.read(read_body(request, ClassifyBody, services.http.max_body_bytes))
    texts, task = _checked(services, body)
    session.priority = task.priority
    results = await session.run(_run(services, session, texts, task))
    return json_response(_answer(services, task, results))


def _checked(services: Services, body: ClassifyBody) -> tuple[list[str], ClassifyTask]:
    check_model(body.model, services.model)
    if body.multi_label:
        raise RequestError("multi_label comes with the prefill pipeline", "multi_label")
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
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise RequestError("input is empty", "input")
    limit = services.http.max_batch_items
    if len(texts) > limit:
        raise RequestError(
            f"input: {len(texts)} texts are more than {limit} (http.max_batch_items)", "input"
        )
    for index, text in enumerate(texts):
        if not text:
            raise RequestError(f"input[{index}] is empty", "input")
    return texts, task


async def _run(
    services: Services, session: Session, texts: list[str], task: ClassifyTask
) -> list[Classified]:
    """All texts are tokenised, and so checked, before the first one is sent to a rank."""

    async def tokenize(text: str) -> Row:
        return await tokenize_row(services.tokenizer, task, text)

    async def classified(numbered: tuple[int, Row]) -> Classified:
        index, row = numbered
        patient = index > 0  # the first row is what the request is admitted or refused with
        row = msgspec.structs.replace(row, patient=patient)
        result = await classify_row(services.backend, task, row)
        session.on_token()
        session.on_sequence_end(result.usage, 0.0, 0.0)
        return result

    rows = await map_bounded(tokenize, texts, limit=1)
    return await map_bounded(classified, enumerate(rows), CONCURRENT_ROWS)


def _answer(services: Services, task: ClassifyTask, results: list[Classified]) -> dict[str, Any]:
    data = [
        {
            "index": index,
            "label": task.labels[result.best],
            "probs": result.probs,
            "num_classes": len(task.labels),
        }
        for index, result in enumerate(results)
    ]
    return {
        **header("classify", "list", services.model.name),
        "data": data,
        "usage": prefill_usage(result.usage for result in results),
    }
