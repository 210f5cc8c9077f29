"""Guided choice: the answer is one of the given texts. Its bounds, and the texts as tokens.

Written `guided_choice: [...]` or `structured_outputs: {"choice": [...]}`, which mean the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec import structs

from cluster.http.errors import UnsupportedFieldError
from cluster.http.field_bounds import MAX_CHOICE_CHARACTERS
from cluster.http.schemas import GenerationBody, GenerationOptions, ModelInfo
from cluster.http.tokenizer_pool import TokenizerPool
from contracts.errors import RequestError
from contracts.requests import Sampling
from contracts.sampling_limits import MAX_CHOICE_TOKENS, MAX_CHOICES, check_lengths
from models.text.encoding_steps import EncodingSteps
from models.text.tokenizer import Tokenizer

MAX_CHARACTERS_TO_CUT = 1 << 20  # of the choices behind each end of a prompt: about a second
TAIL_TOKENS = 8  # of a prompt: what may have a say in how text behind it is cut
TAIL_CHARACTERS = 64  # which is about so much text, to be cut again with each choice


def check_choices(body: GenerationBody) -> tuple[tuple[str, ...] | None, str]:
    """The choices, each once, and the field that they came in. Raises RequestError."""
    name, given = "guided_choice", body.guided_choice
    if body.structured_outputs is not None:
        if given is not None:
            raise RequestError(
                "guided_choice and structured_outputs are both given: one is enough", name
            )
        name, given = "structured_outputs", _choice_of(body)
    if given is None:
        return None, name
    choices = tuple(dict.fromkeys(given))
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"{name} has {len(choices)} choices, expected 1 to {MAX_CHOICES}", name)
    if not all(choices):
        raise RequestError(f"{name}: a choice is empty", name)
    characters = sum(map(len, choices))
    if characters > MAX_CHOICE_CHARACTERS:
        raise RequestError(
            f"{name}: the choices have {characters} characters together, at most"
            f" {MAX_CHOICE_CHARACTERS}",
            name,
        )
    return choices, name


def _choice_of(body: GenerationBody) -> list[str] | None:
    outputs = body.structured_outputs
    assert outputs is not None
    for name in ("grammar", "json", "json_object", "regex", "structural_tag"):
        if getattr(outputs, name) is not None:
            raise UnsupportedFieldError(
                f"structured_outputs.{name} is not supported, only choice", "structured_outputs"
            )
    if outputs.choice is None:
        raise RequestError("structured_outputs: choice is missing", "structured_outputs")
    return outputs.choice


async def samplings(
    tokenizer_pool: TokenizerPool,
    prompts: Sequence[tuple[list[int], int]],
    options: GenerationOptions,
    model: ModelInfo,
) -> list[Sampling]:
    """How each prompt's tokens are chosen. prompts: their ids, and the max_tokens of each; with
    choices no more than the longest one has, so that choices of one token are read from one pass.
    Raises RequestError."""
    made = [structs.replace(options.sampling, max_tokens=most) for _, most in prompts]
    if options.max_tokens == 0:
        return made
    if options.choices is not None:
        found = await choice_ids(tokenizer_pool, [ids for ids, _ in prompts], options, model)
        made = [structs.replace(s, choices=ids) for s, ids in zip(made, found, strict=True)]
    for sampling in made:
        check_lengths(sampling)
    return [
        structs.replace(sampling, max_tokens=max(map(len, sampling.choices)))
        if sampling.choices
        else sampling
        for sampling in made
    ]


async def choice_ids(
    tokenizer_pool: TokenizerPool,
    prompts: Sequence[list[int]],
    options: GenerationOptions,
    model: ModelInfo,
) -> list[list[list[int]]]:
    """Per prompt, the tokens of each choice behind it. Raises RequestError: the choices cannot be
    told from each other by what may be generated, or are too many."""
    choices, name = options.choices, options.choices_field
    assert choices is not None
    tails = {tuple(prompt[-TAIL_TOKENS:]) for prompt in prompts}
    characters = len(tails) * sum(len(choice) + TAIL_CHARACTERS for choice in choices)
    if characters > MAX_CHARACTERS_TO_CUT:
        raise RequestError(
            f"{name}: behind {len(tails)} prompts the choices are {characters} characters to cut,"
            f" at most {MAX_CHARACTERS_TO_CUT}: send fewer prompts at once, or fewer choices",
            name,
        )
    for stop in options.stops:
        if any(stop in choice for choice in choices):
            raise RequestError(f"stop: {stop!r} is part of a choice of {name}", "stop")
    steps = _all_ids(tokenizer_pool.tokenizer, tails, choices, name)
    found = await tokenizer_pool.run(steps, characters, lambda _: None, options.priority)
    for ids in found.values():
        _check_ids(ids, options, model)
    return [found[tuple(prompt[-TAIL_TOKENS:])] for prompt in prompts]


def _all_ids(
    tokenizer: Tokenizer, tails: set[tuple[int, ...]], choices: Sequence[str], name: str
) -> EncodingSteps[dict[tuple[int, ...], list[list[int]]]]:
    alone = tokenizer.encode_many(choices, add_special_tokens=False)
    found = {}
    for tail in tails:
        found[tail] = _ids_behind(tokenizer, tail, choices, alone, name)
        yield 0
    return found


def _ids_behind(
    tokenizer: Tokenizer,
    tail: tuple[int, ...],
    choices: Sequence[str],
    alone: list[list[int]],
    name: str,
) -> list[list[int]]:
    """Each choice cut as text behind the prompt is, where that leaves the prompt's own tokens as
    they are; else as by itself. Either way the tokens say exactly the choice."""
    text = tokenizer.decode(tail, skip_special_tokens=False)
    head, *whole = tokenizer.encode_many(
        [text, *(text + choice for choice in choices)], add_special_tokens=False
    )
    found = []
    for choice, ids, standalone in zip(choices, whole, alone, strict=True):
        behind = ids[len(head) :] if ids[: len(head)] == head else []
        fitting = [
            cut for cut in (behind, standalone) if cut and _decodes_to(tokenizer, cut, choice)
        ]
        if not fitting:
            raise RequestError(f"{name}: {choice!r} cannot be written in the model's tokens", name)
        found.append(fitting[0])
    return found


def _decodes_to(tokenizer: Tokenizer, token_ids: list[int], text: str) -> bool:
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(token_ids) + detokenizer.flush() == text


def _check_ids(ids: list[list[int]], options: GenerationOptions, model: ModelInfo) -> None:
    name = options.choices_field
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
    """Without an end-of-sequence token no choice may begin another one."""
    ordered = sorted(ids)
    for one, after in itertools.pairwise(ordered):
        if after[: len(one)] == one:
            raise RequestError(
                f"{name}: one choice begins another, and the model has no token to end it with",
                name,
            )
