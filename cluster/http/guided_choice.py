"""Guided choice: the answer is one of the given texts, each encoded behind the prompt.

`guided_choice: [...]` and `structured_outputs: {"choice": [...]}` mean the same.
"""

import itertools
from collections.abc import Sequence

from msgspec import structs

from cluster.http.request_context import AppState, RequestContext
from cluster.http.schemas import GenerationOptions, ModelInfo
from contracts.errors import RequestError
from contracts.requests import MAX_CHOICE_TOKENS, Sampling, check_lengths
from models.text.chat_template import EncodingSteps
from models.text.tokenizer import Tokenizer

MAX_TOKENIZED_CHARACTERS = 1 << 20  # of all choices behind all prompt tails: about 1 s
TAIL_TOKENS = 8  # of a prompt that may affect how text behind it is tokenized
TAIL_CHARACTERS = 64  # of such a tail, tokenized again with each choice


async def samplings(
    app_state: AppState,
    ctx: RequestContext,
    prompts: Sequence[tuple[list[int], int]],
    options: GenerationOptions,
) -> list[Sampling]:
    """Return the sampling settings of each prompt. Raises RequestError.

    prompts: token ids and max_tokens of each. With choices, max_tokens is reduced to the longest
    choice, so that choices of one token need one pass.
    """
    made = [structs.replace(options.sampling, max_tokens=most) for _, most in prompts]
    if options.max_tokens == 0:
        return made
    if options.choices is not None:
        found = await _choice_ids(app_state, ctx, [ids for ids, _ in prompts], options)
        made = [structs.replace(s, choices=ids) for s, ids in zip(made, found, strict=True)]
    for sampling in made:
        check_lengths(sampling)
    return [
        structs.replace(sampling, max_tokens=max(map(len, sampling.choices)))
        if sampling.choices
        else sampling
        for sampling in made
    ]


async def _choice_ids(
    app_state: AppState,
    ctx: RequestContext,
    prompts: Sequence[list[int]],
    options: GenerationOptions,
) -> list[list[list[int]]]:
    """Return per prompt the tokens of each choice behind it.

    Raises RequestError if the choices have too many tokens or cannot be distinguished.
    """
    choices, structure = options.choices, options.structure
    assert choices is not None
    assert structure is not None
    name = structure.field
    tails = {tuple(prompt[-TAIL_TOKENS:]) for prompt in prompts}
    characters = len(tails) * sum(len(choice) + TAIL_CHARACTERS for choice in choices)
    if characters > MAX_TOKENIZED_CHARACTERS:
        raise RequestError(
            f"{name}: behind {len(tails)} prompts the choices have {characters} characters,"
            f" at most {MAX_TOKENIZED_CHARACTERS}: send fewer prompts at once, or fewer choices",
            name,
        )
    for stop in options.stops:
        if any(stop in choice for choice in choices):
            raise RequestError(f"stop: {stop!r} is part of a choice of {name}", "stop")
    steps = _all_ids(app_state.tokenizer, tails, choices, name)
    found = await app_state.tokenizer_pool.run(steps, characters, lambda _: None, ctx.priority)
    for ids in found.values():
        _check_ids(ids, options, app_state.model, name)
    return [found[tuple(prompt[-TAIL_TOKENS:])] for prompt in prompts]


def _all_ids(
    tokenizer: Tokenizer, tails: set[tuple[int, ...]], choices: Sequence[str], name: str
) -> EncodingSteps[dict[tuple[int, ...], list[list[int]]]]:
    alone = tokenizer.encode_many(choices, add_special_tokens=False)
    in_line = _encode_behind(tokenizer, "\n", choices)  # no space before a first word
    found = {}
    for tail in tails:
        found[tail] = _ids_behind(tokenizer, tail, choices, [alone, in_line], name)
        yield 0
    return found


def _ids_behind(
    tokenizer: Tokenizer,
    tail: tuple[int, ...],
    choices: Sequence[str],
    others: list[list[list[int]]],
    name: str,
) -> list[list[int]]:
    """Tokenize each choice as text behind the prompt, or as in `others` if that changes the prompt.

    Behind the prompt, the tokens decode to exactly the choice.
    """
    text = tokenizer.decode(tail, skip_special_tokens=False)
    behind = _encode_behind(tokenizer, text, choices)
    found = []
    for choice, *ways in zip(choices, behind, *others, strict=True):
        fitting = [ids for ids in ways if ids and _decodes_to(tokenizer, tail, ids, choice)]
        if not fitting:
            raise RequestError(f"{name}: {choice!r} cannot be written in the model's tokens", name)
        found.append(fitting[0])
    return found


def _encode_behind(tokenizer: Tokenizer, text: str, choices: Sequence[str]) -> list[list[int]]:
    """Return the ids of each choice behind `text`; none if it changes those of `text`."""
    head, *whole = tokenizer.encode_many(
        [text, *(text + choice for choice in choices)], add_special_tokens=False
    )
    return [ids[len(head) :] if ids[: len(head)] == head else [] for ids in whole]


def _decodes_to(tokenizer: Tokenizer, tail: Sequence[int], token_ids: list[int], text: str) -> bool:
    detokenizer = tokenizer.detokenizer(after=tail)
    return detokenizer.push(token_ids) + detokenizer.flush() == text


def _check_ids(
    ids: list[list[int]], options: GenerationOptions, model: ModelInfo, name: str
) -> None:
    tokens = sum(map(len, ids))
    if tokens > MAX_CHOICE_TOKENS:
        raise RequestError(
            f"{name}: the choices have {tokens} tokens together, at most {MAX_CHOICE_TOKENS}", name
        )
    ending = {*model.eos_token_ids, *options.sampling.stop_token_ids}
    inside = sorted(ending.intersection(*[{token for choice in ids for token in choice}]))
    if inside:
        raise RequestError(f"{name}: token {inside[0]} of a choice would end the answer", name)
    if not model.eos_token_ids:
        _check_apart(ids, name)


def _check_apart(ids: list[list[int]], name: str) -> None:
    """Check that no choice begins another one, if the model has no end-of-sequence token."""
    ordered = sorted(ids)
    for one, after in itertools.pairwise(ordered):
        if after[: len(one)] == one:
            raise RequestError(
                f"{name}: one choice begins another, and the model has no token to end it with",
                name,
            )
