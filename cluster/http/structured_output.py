"""Structured output: what restricts an answer, from fields of a request to choices or a grammar.

    guided_choice, structured_outputs.choice                     choices, encoded behind the prompt
    guided_json, structured_outputs.json, response_format        a JSON schema
    guided_regex, guided_grammar, structured_outputs.{regex,grammar}
    tools with a tool_choice other than auto                     a JSON schema of calls

A grammar is compiled before any rank receives it.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import structs

from cluster.http.errors import UnsupportedFieldError
from cluster.http.request_context import AppState, RequestContext
from cluster.http.schemas import (
    MAX_CHOICE_CHARACTERS,
    MAX_GRAMMAR_SOURCE,
    ChatBody,
    GenerationBody,
    GenerationOptions,
    ModelInfo,
    ResponseFormat,
    Structure,
    StructuredOutputs,
    Tool,
)
from contracts.errors import RequestError
from contracts.requests import MAX_CHOICE_TOKENS, Caller, Sampling, check_lengths
from models.text.answer_format import AnswerParser, CallListParser, NamedCallParser
from models.text.chat_template import EncodingSteps
from models.text.grammar import CompileRequest
from models.text.json_schema import below_root
from models.text.tokenizer import Tokenizer

MAX_TOKENIZED_CHARACTERS = 1 << 20  # of all choices behind all prompt tails: about 1 s
TAIL_TOKENS = 8  # of a prompt that may affect how text behind it is tokenized
TAIL_CHARACTERS = 64  # of such a tail, tokenized again with each choice
_AT_ROOT = ("$schema", "$id")  # keywords with a meaning at the root of a schema only
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_GUIDED = {
    "guided_choice": "choice",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "lark",
}


def requested_structure(body: GenerationBody) -> Structure | None:
    """Return what restricts the answer. Raises RequestError if several fields do."""
    found = [
        Structure(field, kind, value)
        for field, kind in _GUIDED.items()
        if (value := getattr(body, field)) is not None
    ]
    if body.structured_outputs is not None:
        found.append(_from_outputs(body.structured_outputs))
    if body.response_format is not None and body.response_format.type != "text":
        found.append(_from_format(body.response_format))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise RequestError(f"{first} and {second} are both given: one is enough", first)
    return _distinct(found[0]) if found else None


def _distinct(structure: Structure) -> Structure:
    """Return the structure, if it is choices without repetitions. Raises RequestError."""
    if structure.kind != "choice":
        return structure
    choices = list(dict.fromkeys(structure.value))
    characters = sum(map(len, choices))
    if characters > MAX_CHOICE_CHARACTERS:
        raise RequestError(
            f"{structure.field}: the choices have {characters} characters together, at most"
            f" {MAX_CHOICE_CHARACTERS}",
            structure.field,
        )
    return structs.replace(structure, value=choices)


def choices_of(options: GenerationOptions) -> tuple[str, ...] | None:
    """Return the texts of which the answer is one; None: other or no structure."""
    structure = options.structure
    return tuple(structure.value) if structure and structure.kind == "choice" else None


def _from_outputs(outputs: StructuredOutputs) -> Structure:
    name = "structured_outputs"
    if outputs.structural_tag is not None:
        raise UnsupportedFieldError(f"{name}.structural_tag is not supported", name)
    found = [
        Structure(name, kind, value)
        for kind, value in (
            ("choice", outputs.choice),
            ("json", outputs.json),
            ("json", _ANY_OBJECT if outputs.json_object else None),
            ("regex", outputs.regex),
            ("lark", outputs.grammar),
        )
        if value is not None
    ]
    if len(found) != 1:
        raise RequestError(
            f"{name}: expected one of choice, json, json_object, regex and grammar,"
            f" got {len(found)}",
            name,
        )
    return found[0]


def _from_format(given: ResponseFormat) -> Structure:
    name = "response_format"
    if given.type == "json_object":
        return Structure(name, "json", _ANY_OBJECT)
    if given.json_schema is None:
        raise RequestError(f"{name}: type json_schema needs json_schema", name)
    return Structure(name, "json", given.json_schema.schema)


def check_ends(sampling: Sampling, structure: Structure | None) -> None:
    """Raise RequestError for min_tokens with a structure, which ends the answer itself."""
    if sampling.min_tokens and structure is not None:
        raise RequestError(
            f"min_tokens={sampling.min_tokens}: {structure.field} determines where the answer ends;"
            " leave min_tokens out",
            "min_tokens",
        )


def requested_tools(body: ChatBody, tokenizer: Tokenizer) -> list[Tool]:
    """Return the tools that the model may call. Raises RequestError."""
    choice = body.tool_choice
    if choice is not None and not body.tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice needs tools", "tool_choice")
    if not body.tools or choice == "none":
        return []
    if not tokenizer.has_tools:
        raise RequestError("this model's chat template has no tools: leave them out", "tools")
    if choice in (None, "auto") and not tokenizer.answer_format.has_calls:
        raise RequestError(
            "this model has no format of tool calls: set tool_choice to required or a tool", "tools"
        )
    return body.tools


class ForcedCall(NamedTuple):
    """A structure that makes the answer a call, and the parser of such an answer."""

    structure: Structure
    new_parser: Callable[[], AnswerParser]


def forced_call(body: ChatBody, tools: list[Tool]) -> ForcedCall | None:
    """Return what `tool_choice` forces: nothing, one tool's arguments, or a list of calls.

    Raises RequestError.
    """
    choice = body.tool_choice
    if not tools or choice in (None, "auto"):
        return None
    if choice == "required":
        most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
        schema = {"type": "array", "minItems": 1, **most, **_any_call(tools)}
        return ForcedCall(Structure("tools", "json", schema), CallListParser)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool.function.name == name:
            structure = Structure("tools", "json", _schema(tool))
            return ForcedCall(structure, partial(NamedCallParser, tool.function.name))
    raise RequestError(
        "tool_choice: expected auto, none, required or"
        ' {"type": "function", "function": {"name": one of the tools}}',
        "tool_choice",
    )


def _schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {})}


def _any_call(tools: list[Tool]) -> dict[str, Any]:
    """Return the items of a list of calls. The tools' schemas are definitions at its root."""
    calls, definitions = [], dict[str, Any]()
    for tool in tools:
        name, schema = tool.function.name, _schema(tool)
        if name in definitions:
            raise RequestError(f"tools: two are named {name!r}", "tools")
        root = f"/$defs/{quote(name)}"
        definitions[name] = below_root({k: v for k, v in schema.items() if k not in _AT_ROOT}, root)
        fields = {"name": {"const": name}, "arguments": {"$ref": f"#{root}"}}
        calls.append(
            {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
        )
    return {"items": {"anyOf": calls}, "$defs": definitions}


async def samplings(
    app_state: AppState,
    ctx: RequestContext,
    prompts: Sequence[tuple[list[int], int]],
    options: GenerationOptions,
) -> list[Sampling]:
    """Return the sampling settings of each prompt. Raises RequestError, OverloadError.

    prompts: token ids and max_tokens of each. With choices, max_tokens is reduced to the longest
    choice, so that choices of one token need one pass.
    """
    grammar = await _compiled_grammar(app_state, options.structure, ctx.caller)
    sampling = structs.replace(options.sampling, grammar=grammar)
    made = [structs.replace(sampling, max_tokens=most) for _, most in prompts]
    if options.max_tokens == 0:
        return made
    if choices_of(options) is not None:
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


async def _compiled_grammar(
    app_state: AppState, structure: Structure | None, caller: Caller
) -> str | None:
    if structure is None or structure.kind == "choice":
        return None
    name, text = structure.field, structure.value
    if not app_state.model.eos_token_ids:
        raise RequestError(f"{name}: the model has no token to end the answer with", name)
    if not isinstance(text, str):
        text = msgspec.json.encode(text).decode()
    if len(text) > MAX_GRAMMAR_SOURCE:
        raise RequestError(
            f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_SOURCE} are accepted", name
        )
    request = CompileRequest(structure.kind, text, structure.before)
    answer = await app_state.grammars.compile(request, caller)
    if answer.error:
        raise RequestError(f"{name}: {answer.error}", name)
    return answer.grammar


async def _choice_ids(
    app_state: AppState,
    ctx: RequestContext,
    prompts: Sequence[list[int]],
    options: GenerationOptions,
) -> list[list[list[int]]]:
    """Return per prompt the tokens of each choice behind it.

    Raises RequestError if the choices have too many tokens or cannot be distinguished.
    """
    choices, structure = choices_of(options), options.structure
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
