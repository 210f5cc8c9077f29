"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import (
    Collected,
)
from cluster.api.checks import (
    check_logprobs,
    check_model,
    check_options,
    check_supported,
    check_tokens,
    room_for,
)
from cluster.api.cost import (
    COMPLETION_ALTERNATIVE_BYTES,
    generated_answer_bytes,
    scored_bytes,
)
from cluster.api.echo import text_of
from cluster.api.generation import Job, Prompt, generation
from cluster.api.guided import samplings
from cluster.api.logprobs import CompletionLogprobs, completion_logprobs
from cluster.api.schemas import CompletionBody, GenerationOptions
from cluster.api.session import Services, Session
from cluster.api.text import Delta
from contracts.errors import RequestError
from models.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(services: Services, session: Session, request: Request) -> Response:
    return await generation(services, session, request, CompletionBody, _job, _Wording)


async def _job(services: Services, session: Session, body: CompletionBody) -> Job:
    """The request, checked: see `checks.py` for the order."""
    check_supported(body)
    check_model(body.model, services.model)
    top = check_logprobs("logprobs", body.logprobs)
    options = check_options(body, services.model, session.priority, logprobs=top)
    if options.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)", "max_tokens")
    listed = _prompts(body.prompt)
    if len(listed) * options.n > services.http.max_batch_items:
        raise RequestError(
            f"prompt: {len(listed)} prompts times n={options.n} are more than"
            f" {services.http.max_batch_items} (http.max_batch_items)",
            "prompt",
        )
    model, sizes = services.model, []
    default = DEFAULT_MAX_TOKENS
    if options.choices is not None:  # room for any of them, in whatever tokens; it is cut later
        default = 4 * max(len(choice.encode()) for choice in options.choices) + 4
    pool_tokens = services.backend.pool_tokens(
        prefill=options.max_tokens is not None and options.max_tokens <= 1
    )
    token_ids = await _token_ids(services, session, listed)
    for ids in token_ids:
        check_tokens(ids, model, "prompt")
        room = room_for(
            *(len(ids), options, model),
            default=default,
            param="prompt",
            pool_tokens=pool_tokens,
        )
        sizes.append((len(ids), room))
    _check_cost(services, session, options, sizes, echo=bool(body.echo))
    with_rooms = [(ids, room) for ids, (_, room) in zip(token_ids, sizes, strict=True)]
    sampled = await samplings(services.tokenizing, with_rooms, options, model)
    prompts = []
    for number, (ids, sampling) in enumerate(zip(token_ids, sampled, strict=True)):
        text = await _echo_text(services, listed[number]) if body.echo else ""
        prompts.append(Prompt(ids, sampling, text))
    # lm-eval takes the last token listed for the one that was generated: an eos is among them
    return Job(prompts, options, echo=bool(body.echo), lists_eos=True)


def _check_cost(
    services: Services,
    session: Session,
    options: GenerationOptions,
    sizes: list[tuple[int, int]],
    *,
    echo: bool,
) -> None:
    """sizes: tokens of each prompt, and those to generate. Charges what scoring the prompts for
    their echo will hold. Raises TooCostlyError, OverloadError."""
    bounds, top = services.bounds, options.sampling.logprobs
    prompts = sum(prompt for prompt, _ in sizes)
    generated = sum(room for _, room in sizes)
    tokens = (prompts + generated) * options.n
    bounds.check_passes("prompt", len(sizes) * options.n, tokens)
    told = (prompts if echo else 0) + (0 if options.stream else generated)
    size = generated_answer_bytes(told * options.n, top, COMPLETION_ALTERNATIVE_BYTES)
    bounds.check_answer("prompt" if top is None else "logprobs", size)
    if echo and top is not None:
        session.account.charge(scored_bytes(prompts, top), "logprobs")


def _prompts(given: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """One entry per prompt: all strings, or all lists of token ids. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    texts = [item for item in given if isinstance(item, str)]
    token_ids = [item for item in given if isinstance(item, int)]
    lists = [item for item in given if isinstance(item, list)]
    if not given:
        raise RequestError("prompt is empty", "prompt")
    if len(token_ids) == len(given):
        return [token_ids]
    if len(texts) == len(given):
        return texts
    if len(lists) == len(given):
        return lists
    raise RequestError(
        "prompt: expected a string, strings, token ids, or lists of token ids, not a mixture",
        "prompt",
    )


async def _token_ids(
    services: Services, session: Session, listed: list[str] | list[list[int]]
) -> list[list[int]]:
    texts = [given for given in listed if isinstance(given, str)]
    if not all(texts):
        raise RequestError("prompt is empty", "prompt")
    if texts:
        for text in texts:
            services.bounds.check_text("prompt", len(text))
        most = services.model.max_context_tokens
        return await services.tokenizing.encode(
            texts,
            session.charge_tokens,
            param="prompt",
            characters=sum(map(len, texts)),
            max_tokens=most,
            priority=session.priority,
        )
    return [given for given in listed if isinstance(given, list)]


async def _echo_text(services: Services, given: str | list[int]) -> str:
    """A prompt of token ids comes back as all its text, special tokens included."""
    return given if isinstance(given, str) else await text_of(services, given)


class _Wording:
    """Plain text."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, wanted: int | None) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted

    def logprobs(self) -> CompletionLogprobs | None:
        wanted = self._wanted
        return None if wanted is None else CompletionLogprobs(self._tokenizer, wanted)

    def choice(self, index: int, choice: Collected) -> dict[str, Any]:
        return {"index": index, "text": choice.text, "finish_reason": choice.finish_reason}

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return []
        logprobs = None
        if self._wanted is not None:
            logprobs = completion_logprobs(self._tokenizer, delta.tokens, self._wanted)
        piece = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        return [piece]
