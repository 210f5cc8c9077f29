"""`POST /v1/score`: how likely each of a few tokens is to come next, for many items.

A prompt is the query followed by an item (`item_first`: the other way round). The scores are the
labels' probabilities over the whole vocabulary, or with `apply_softmax` among the labels only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.classification.bounded import map_bounded
from cluster.classification.classify import checked_scores, softmax
from cluster.http.authenticator import with_cache_salt
from cluster.http.body import read_request_body
from cluster.http.checks import check_model, check_priority, check_tokens
from cluster.http.cost import SHARED_TOKEN_BYTES, Bounds, scored_answer_bytes
from cluster.http.request_context import AppState, RequestContext
from cluster.http.responses import (
    json_list,
    json_object,
    pieces_response,
    response_fields,
    token_usage,
)
from cluster.http.schemas import ScoreBody
from contracts.errors import RequestError, TooLongError
from contracts.messages import Scored, Submit
from contracts.metrics import Pipeline
from contracts.requests import Usage

CONCURRENT_ITEMS = 256  # of one request; the rest wait their turn here
MAX_LABEL_TOKENS = 1024
SCORES_AT_ONCE = 1 << 14


class ScoreJob(msgspec.Struct, frozen=True):
    prompts: list[list[int]]
    label_token_ids: list[int]
    apply_softmax: bool


async def score(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.pipeline = Pipeline.PREFILL
    body = await read_request_body(app_state, ctx, request, ScoreBody)
    ctx.set_priority(check_priority(body, default=ctx.priority))
    ctx.caller = with_cache_salt(ctx.caller, body.cache_salt)
    answers = await ctx.run(_run(app_state, ctx, body))
    usage = token_usage(usage for _, usage in answers)
    head = {**response_fields("score", "scoring", app_state.model.name), "usage": usage}
    scores = json_list([scores] for scores, _ in answers)
    return pieces_response(json_object(head, {"scores": scores}))


async def _job(app_state: AppState, ctx: RequestContext, body: ScoreBody) -> ScoreJob:
    if body.model is not None:
        check_model(body.model, app_state.model)
    labels = body.label_token_ids
    check_tokens(labels, app_state.model, "label_token_ids")
    if len(labels) > MAX_LABEL_TOKENS:
        raise RequestError(
            f"label_token_ids has {len(labels)} ids, at most {MAX_LABEL_TOKENS}", "label_token_ids"
        )
    items = [body.items] if isinstance(body.items, str) else body.items
    limit = app_state.http.max_batch_items
    if not 1 <= len(items) <= limit:
        raise RequestError(
            f"items has {len(items)} entries, expected 1 to {limit} (http.max_batch_items)", "items"
        )
    app_state.bounds.check_answer("items", scored_answer_bytes(len(items), len(labels)))
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
    return ScoreJob(prompts, labels, body.apply_softmax)


async def _prompts(
    app_state: AppState, ctx: RequestContext, body: ScoreBody, items: Sequence[str | list[int]]
) -> list[list[int]]:
    """Texts are joined before they are tokenised; ids are joined as they are. Both are counted
    before that: the query goes into each of the prompts."""
    query, first = body.query, body.item_first
    texts = [item for item in items if isinstance(item, str)]
    lists = [item for item in items if isinstance(item, list)]
    if isinstance(query, str) and len(texts) == len(items):
        characters = _check_characters(app_state.bounds, query, texts)
        return await app_state.tokenizer_pool.encode(
            (text + query if first else query + text for text in texts),
            ctx.charge_tokens,
            param="items",
            characters=characters,
            max_tokens=app_state.bounds.context_tokens,
            priority=ctx.priority,
        )
    if isinstance(query, list) and len(lists) == len(items):
        tokens = sum(len(query) + len(ids) for ids in lists)
        app_state.bounds.check_passes("items", len(lists), tokens)
        ctx.account.charge(tokens * SHARED_TOKEN_BYTES, "items")
        return [ids + query if first else query + ids for ids in lists]
    raise RequestError("query and items must all be texts, or all be lists of token ids", "items")


def _check_characters(bounds: Bounds, query: str, texts: Sequence[str]) -> int:
    """Of all prompts together. Raises TooLongError, TooCostlyError."""
    characters = 0
    for text in texts:
        bounds.check_text("items", len(query) + len(text))
        characters += len(query) + len(text)
    bounds.check_passes("items", len(texts), characters // bounds.token_characters)
    return characters


async def _run(
    app_state: AppState, ctx: RequestContext, body: ScoreBody
) -> list[tuple[bytes, Usage]]:
    """Per item its scores as JSON: as objects they take several times as much."""
    job = await _job(app_state, ctx, body)

    async def run(numbered: tuple[int, list[int]]) -> tuple[bytes, Usage]:
        index, prompt = numbered
        submit = Submit(
            request_id=0,
            token_ids=prompt,
            sampling=None,
            priority=ctx.priority,
            candidates=job.label_token_ids,
            caller=ctx.caller,
        )
        scored = await app_state.backend.score(submit, wait_for_slot=index > 0)
        ctx.on_token()
        ctx.on_sequence_end(scored.usage, 0.0, 0.0)
        scores = msgspec.json.encode(_scores(job, scored))
        ctx.account.grow(len(scores))
        return scores, scored.usage

    # Answers may come together, and each is made JSON in the turn in which it comes.
    at_once = max(1, min(CONCURRENT_ITEMS, SCORES_AT_ONCE // len(job.label_token_ids)))
    return await map_bounded(run, enumerate(job.prompts), at_once)


def _scores(job: ScoreJob, scored: Scored) -> list[float]:
    count = len(job.label_token_ids)
    if job.apply_softmax:
        return softmax(checked_scores(scored.candidate_logits, count))
    return [math.exp(logprob) for logprob in checked_scores(scored.candidate_logprobs, count)]
