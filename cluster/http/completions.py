"""`POST /v1/completions`."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.body import (
    check_model,
    check_options,
    check_supported,
    check_tokens,
    resolve_max_tokens,
)
from cluster.http.cost import COMPLETION_ALTERNATIVE_BYTES, generated_answer_bytes, scored_bytes
from cluster.http.generation import GenerationJob, GenerationPrompt, generation
from cluster.http.request_context import AppState, RequestContext
from cluster.http.responses import ChoiceBuilder, LogprobsOf, completion_logprobs
from cluster.http.schemas import CompletionBody, GenerationOptions
from cluster.http.structured_output import choices_of, samplings
from cluster.http.text import Delta, decode_text
from contracts.errors import RequestError
from models.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(app_state: AppState, ctx: RequestContext, request: Request) -> Response:
    return await generation(app_state, ctx, request, CompletionBody, _job)


async def _job(app_state: AppState, ctx: RequestContext, body: CompletionBody) -> GenerationJob:
    check_supported(body)
    check_model(body.model, app_state.model)
    options = check_options(body, app_state.model, logprobs=body.logprobs)
    if options.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)", "max_tokens")
    listed = _prompts(body.prompt)
    if len(listed) * options.n > app_state.http.max_batch_items:
        raise RequestError(
            f"prompt: {len(listed)} prompts times n={options.n} are more than"
            f" {app_state.http.max_batch_items} (http.max_batch_items)",
            "prompt",
        )
    model, sizes = app_state.model, []
    default = DEFAULT_MAX_TOKENS
    if choices := choices_of(options):  # room for any choice; reduced later
        default = 4 * max(len(choice.encode()) for choice in choices) + 4
    adds = body.add_special_tokens is not False
    token_ids = await _token_ids(app_state, ctx, listed, add_special_tokens=adds)
    for ids in token_ids:
        check_tokens(ids, model, "prompt")
        room = resolve_max_tokens(len(ids), options, app_state, default=default, param="prompt")
        sizes.append((len(ids), room))
    _check_cost(app_state, ctx, options, sizes, echo=bool(body.echo))
    with_rooms = [(ids, room) for ids, (_, room) in zip(token_ids, sizes, strict=True)]
    sampled = await samplings(app_state, ctx, with_rooms, options)
    prompts = []
    for number, (ids, sampling) in enumerate(zip(token_ids, sampled, strict=True)):
        given, text = listed[number], ""
        if body.echo and isinstance(given, str):
            text = given
        elif body.echo and isinstance(given, list):  # with special tokens
            is_last = options.max_tokens == 0
            text = await decode_text(app_state.tokenizer, given, complete=is_last)
        prompts.append(GenerationPrompt(ids, sampling, text))
    # lm-eval takes the last listed token for the generated one: an eos must be listed
    formatter = _CompletionFormatter(app_state.tokenizer, options.sampling.logprobs)
    return GenerationJob(prompts, options, formatter, echo=bool(body.echo), lists_eos=True)


def _check_cost(
    app_state: AppState,
    ctx: RequestContext,
    options: GenerationOptions,
    sizes: list[tuple[int, int]],
    *,
    echo: bool,
) -> None:
    """Check the cost and charge the scores of echoed prompts. Raises TooCostlyError, OverloadError.

    sizes: tokens of each prompt, and tokens to generate behind it.
    """
    bounds, top = app_state.bounds, options.sampling.logprobs
    prompts = sum(prompt for prompt, _ in sizes)
    generated = sum(room for _, room in sizes)
    tokens = (prompts + generated) * options.n
    bounds.check_passes("prompt", len(sizes) * options.n, tokens)
    answer_tokens = (prompts if echo else 0) + (0 if options.stream else generated)
    size = generated_answer_bytes(answer_tokens * options.n, top, COMPLETION_ALTERNATIVE_BYTES)
    bounds.check_answer("prompt" if top is None else "logprobs", size)
    if echo and top is not None:
        ctx.account.charge(scored_bytes(prompts, top), "logprobs")


def _prompts(given: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """Return one entry per prompt: all strings, or all lists of token ids."""
    if not given:
        raise RequestError("prompt is empty", "prompt")
    kinds = {type(item) for item in given}
    if isinstance(given, str) or kinds == {int}:
        return [given]  # type: ignore[return-value,list-item]
    if len(kinds) == 1:
        return given  # type: ignore[return-value]
    raise RequestError(
        "prompt: expected a string, strings, token ids, or lists of token ids, not a mixture",
        "prompt",
    )


async def _token_ids(
    app_state: AppState,
    ctx: RequestContext,
    listed: list[str] | list[list[int]],
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    texts = [given for given in listed if isinstance(given, str)]
    if not all(texts):
        raise RequestError("prompt is empty", "prompt")
    if texts:
        for text in texts:
            app_state.bounds.check_text("prompt", len(text))
        most = app_state.model.max_context_tokens
        steps = app_state.tokenizer.encode_steps(
            texts, param="prompt", max_tokens=most, add_special_tokens=add_special_tokens
        )
        characters = sum(map(len, texts))
        return await app_state.tokenizer_pool.run(
            steps, characters, ctx.charge_tokens, ctx.priority
        )
    return [given for given in listed if isinstance(given, list)]


class _CompletionFormatter:
    prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self.logprobs_of: LogprobsOf | None = None
        if top is not None:
            self.logprobs_of = partial(completion_logprobs, tokenizer, top)

    def choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        return {"index": index, "text": choice.text, "finish_reason": choice.finish_reason}

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return []
        piece = {
            "index": index,
            "text": delta.text,
            "logprobs": self.logprobs_of(delta.tokens) if self.logprobs_of else None,
            "finish_reason": delta.finish_reason,
        }
        return [piece]
