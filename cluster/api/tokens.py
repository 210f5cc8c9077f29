"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: what a text or a conversation is to
the model, and back. No rank is asked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answer_types import Detokenized, Tokenized
from cluster.api.answers import json_response
from cluster.api.body import body_of
from cluster.api.chat import chat_token_ids, template_variables
from cluster.api.checks import check_model, check_tokens
from cluster.api.echo import text_of
from cluster.api.errors import UnsupportedFieldError
from cluster.api.schemas import DetokenizeBody, TokenizeBody
from cluster.api.session import Services, Session
from contracts.errors import RequestError, TooLongError


async def tokenize(services: Services, session: Session, request: Request) -> Response:
    session.not_counted()
    body = await body_of(services, session, request, TokenizeBody)
    token_ids = await session.run(_token_ids(services, session, body))
    text = services.tokenizer.token_text
    answer = Tokenized(
        count=len(token_ids),
        max_model_len=services.model.max_context_tokens,
        tokens=token_ids,
        token_strs=[text(each) for each in token_ids] if body.return_token_strs else None,
    )
    return json_response(answer)


async def detokenize(services: Services, session: Session, request: Request) -> Response:
    session.not_counted()
    body = await body_of(services, session, request, DetokenizeBody)
    if body.model is not None:
        check_model(body.model, services.model)
    context = services.model.max_context_tokens
    if len(body.tokens) > context:
        raise TooLongError(
            f"tokens: {len(body.tokens)} are more than the {context} that the model's context"
            " holds: send them in parts",
            "tokens",
        )
    if body.tokens:
        check_tokens(body.tokens, services.model, "tokens")
    return json_response(Detokenized(prompt=await session.run(text_of(services, body.tokens))))


async def _token_ids(services: Services, session: Session, body: TokenizeBody) -> list[int]:
    if body.model is not None:
        check_model(body.model, services.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt or messages: give one of them", "prompt")
    if body.messages is not None:
        return await chat_token_ids(
            services,
            session,
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
    services.bounds.check_text("prompt", len(body.prompt))
    (token_ids,) = await services.tokenizing.encode(
        [body.prompt],
        session.charge_tokens,
        param="prompt",
        characters=len(body.prompt),
        max_tokens=services.model.max_context_tokens,
        add_special_tokens=body.add_special_tokens is not False,
    )
    return token_ids
