"""Values of request fields: ranges, combinations, lengths.

Order: API key, body (see `body.py`), unsupported fields, model, values, then the prompt: tokens,
their range, the context. The first fault found is the one reported. Only then is a rank asked for.
"""

from __future__ import annotations

from typing import TypeVar

from cluster.http.errors import UnsupportedFieldError
from cluster.http.field_bounds import MAX_N, MAX_STOP_CHARACTERS, MAX_STOPS
from cluster.http.guided_choice import check_choices
from cluster.http.schemas import (
    NEUTRAL,
    GenerationBody,
    GenerationOptions,
    ModelInfo,
    PrioritizedFields,
    UnsupportedFields,
)
from contracts.errors import RequestError, TooLongError, UnknownModelError
from contracts.requests import Priority, Sampling
from contracts.sampling_limits import INT64, MAX_LOGPROBS, check_sampling

MAX_ID_DIGITS = 10
_DEFAULTS = Sampling()

Value = TypeVar("Value")


def check_supported(body: UnsupportedFields) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, accepted) for accepted in neutral):
            raise UnsupportedFieldError(f"{name} is not supported", name)


def _same(value: object, other: object) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_model(name: str, model: ModelInfo) -> None:
    if name != model.name:
        raise UnknownModelError(f"model {name!r} is not served; this is {model.name!r}", "model")


def check_options(
    body: GenerationBody, model: ModelInfo, priority: Priority, *, logprobs: int | None
) -> GenerationOptions:
    """The common fields, with defaults filled in. priority: of the request. max_tokens 0 is the
    caller's to judge."""
    n = _within("n", body.n, 1, MAX_N, default=1)
    if body.best_of is not None and body.best_of != n:
        raise UnsupportedFieldError(
            f"best_of={body.best_of} is not supported (n is {n})", "best_of"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    if body.max_tokens is not None and body.max_tokens < 0:
        raise RequestError(f"max_tokens={body.max_tokens} must not be negative", "max_tokens")
    options = body.stream_options
    sampling = _sampling(body, logprobs, model)
    choices, choices_field = check_choices(body)
    _check_min_tokens(sampling, choices)
    return GenerationOptions(
        sampling=sampling,
        max_tokens=body.max_tokens,
        priority=priority,
        stops=_stops(body.stop),
        choices=choices,
        choices_field=choices_field,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
    )


def check_logprobs(name: str, value: int | None) -> int | None:
    return None if value is None else _within(name, value, 0, MAX_LOGPROBS, default=0)


TIERS = {"flex": Priority.BE, "priority": Priority.LS}  # others are the default class


def check_priority(body: PrioritizedFields, *, default: Priority) -> Priority:
    """`priority` is "ls", "be", or an integer as in vLLM: 0 is ls, greater is be. Without it
    `service_tier` counts, as OpenAI names it."""
    value = body.priority
    if value is None:
        return TIERS.get(body.service_tier or "", default)
    if isinstance(value, str):
        by_label = {priority.label: priority for priority in Priority}
        if value not in by_label:
            raise RequestError(f"priority={value!r}: expected ls or be", "priority")
        return by_label[value]
    if value < 0:
        raise RequestError(f"priority={value} must not be negative", "priority")
    return Priority.BE if value > 0 else Priority.LS


def check_tokens(token_ids: list[int], model: ModelInfo, param: str) -> None:
    """A prompt's tokens: there are some, and the model knows them."""
    if not token_ids:
        raise RequestError(f"{param} is empty", param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"{param}: token id {bad} is outside the vocabulary (0 to {model.vocab_size - 1})",
            param,
        )


def resolve_max_tokens(
    prompt_tokens: int,
    options: GenerationOptions,
    model: ModelInfo,
    *,
    default: int,
    param: str,
    pool_tokens: int | None = None,
) -> int:
    """max_tokens for this prompt. Stated: it must fit behind the prompt, or 400. Not stated: the
    default, cut to what fits. A prompt that leaves no room for one token is 413.

    pool_tokens: what a rank's KV pool holds, where that is known: less than the context on a small
    machine."""
    capacity, holder = model.max_context_tokens, "the model's context"
    if pool_tokens is not None and pool_tokens < capacity:
        capacity, holder = pool_tokens, "a rank's KV pool (kv.pool_tokens)"
    room = capacity - prompt_tokens
    needed = 0 if options.max_tokens == 0 else 1
    if room < needed:
        raise TooLongError(
            f"{param} has {prompt_tokens} tokens, {holder} holds {capacity}"
            f" including at least {needed} to generate: shorten it",
            param,
        )
    if options.max_tokens is None:
        return min(default, room)
    if options.max_tokens > room:
        raise RequestError(
            f"max_tokens={options.max_tokens} and {prompt_tokens} prompt tokens are more than the"
            f" {capacity} tokens that {holder} holds: ask for at most {room}",
            "max_tokens",
        )
    return options.max_tokens


def _check_min_tokens(sampling: Sampling, choices: tuple[str, ...] | None) -> None:
    if sampling.min_tokens and choices is not None:
        raise RequestError(
            f"min_tokens={sampling.min_tokens}: a choice is as long as it is; leave min_tokens out",
            "min_tokens",
        )


def _sampling(body: GenerationBody, logprobs: int | None, model: ModelInfo) -> Sampling:
    top_k = _or_default(body.top_k, _DEFAULTS.top_k)
    if top_k < -1:
        raise RequestError(f"top_k={top_k} must be within -1 and {INT64 - 1}", "top_k")
    sampling = Sampling(
        temperature=_or_default(body.temperature, _DEFAULTS.temperature),
        top_p=_or_default(body.top_p, _DEFAULTS.top_p),
        min_p=_or_default(body.min_p, _DEFAULTS.min_p),
        seed=body.seed,
        presence_penalty=_or_default(body.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=_or_default(body.frequency_penalty, _DEFAULTS.frequency_penalty),
        repetition_penalty=_or_default(body.repetition_penalty, _DEFAULTS.repetition_penalty),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_or_default(body.stop_token_ids, []),
        min_tokens=_or_default(body.min_tokens, _DEFAULTS.min_tokens),
        top_k=max(top_k, 0),  # vLLM says -1 where we say 0: no limit
        logit_bias=_biases(body.logit_bias or {}),
        logprobs=logprobs,
    )
    check_sampling(sampling, model.vocab_size)
    return sampling


def _or_default(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _biases(given: dict[str, float]) -> dict[int, float] | None:
    """By token id; None where there are none."""
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: {token[:32]!r} is not the id of a token", "logit_bias")
    return {int(token): bias for token, bias in given.items()} or None


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, at most {MAX_STOPS}", "stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop: a string has {len(text)} characters, expected 1 to {MAX_STOP_CHARACTERS}",
                "stop",
            )
    return tuple(stops)


def _within(name: str, value: int | None, low: int, high: int, *, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{name}={value} must be within {low} and {high}", name)
    return value
