"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: what a text or a conversation is to
the model, and back. No rank is asked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.body import read_request_body
from cluster.http.chat import chat_token_ids, template_variables
from cluster.http.checks import check_model, check_tokens
from cluster.http.echo import text_of
from cluster.http.errors import UnsupportedFieldError
from cluster.http.request_context import AppState, RequestContext
from cluster.http.response_types import Detokenized, Tokenized
from cluster.http.responses import json_response
from cluster.http.schemas import DetokenizeBody, TokenizeBody
from contracts.errors import RequestError, TooLongError


async def tokenize(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.exclude_from_metrics()
    body = await read_request_body(app_state, ctx, request, TokenizeBody)
    token_ids = await ctx.run(_token_ids(app_state, ctx, body))
    text = app_state.tokenizer.token_text
    answer = Tokenized(
        count=len(token_ids),
        max_model_len=app_state.model.max_context_tokens,
        tokens=token_ids,
        token_strs=[text(each) for each in token_ids] if body.return_token_strs else None,
    )
    return json_response(answer)


async def detokenize(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    ctx.exclude_from_metrics()
    body = await read_request_body(app_state, ctx, request, DetokenizeBody)
    if body.model is not None:
        check_model(body.model, app_state.model)
    context = app_state.model.max_context_tokens
    if len(body.tokens) > context:
        raise TooLongError(
            f"tokens: {len(body.tokens)} are more than the {context} that the model's context"
            " holds: send them in parts",
            "tokens",
        )
    if body.tokens:
        check_tokens(body.tokens, app_state.model, "tokens")
    return json_response(Detokenized(prompt=await ctx.run(text_of(app_state, body.tokens))))


async def _token_ids(app_state: AppState, ctx: RequestContext, body: TokenizeBody) -> list[int]:
    if body.model is not None:
        check_model(body.model, app_state.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt or messages: give one of them", "prompt")
    if body.messages is not None:
        return await chat_token_ids(
            app_state,
            ctx,
            body.messages,
            template_variables(body.chat_template_kwargs),
            add_special_tokens=bool(body.add_special_tokens),
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    if body.add_generation_prompt is not None or body.chat_template_kwargs is not None:
        raise UnsupportedFieldError(
            "add_generation_prompt and chat_template_kwargs are for messages", "messages"
        )
    assert body.prompt is not None
    app_state.bounds.check_text("prompt", len(body.prompt))
    (token_ids,) = await app_state.tokenizer_pool.encode(
        [body.prompt],
        ctx.charge_tokens,
        param="prompt",
        characters=len(body.prompt),
        max_tokens=app_state.model.max_context_tokens,
        add_special_tokens=body.add_special_tokens is not False,
    )
    return token_ids
