"""Structured output: fields of a request to choices or a compiled grammar.

    guided_choice, structured_outputs.choice                     choices (guided_choice.py)
    guided_json, structured_outputs.json, response_format        a JSON schema
    guided_regex, guided_grammar, structured_outputs.{regex,grammar}

A grammar is compiled before any rank receives it.
"""

from typing import Any

import msgspec
from msgspec import structs

from cluster.http.errors import UnsupportedFieldError
from cluster.http.grammar_compiler import GrammarCompiler
from cluster.http.schemas import (
    MAX_CHOICE_CHARACTERS,
    MAX_GRAMMAR_SOURCE,
    GenerationBody,
    GenerationOptions,
    ModelInfo,
    ResponseFormat,
    Structure,
    StructuredOutputs,
)
from contracts.errors import RequestError
from contracts.requests import Caller, Sampling
from models.text.grammar import CompileRequest

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
    return found[0] if found else None


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


def checked_choices(structure: Structure | None) -> tuple[str, ...] | None:
    """Return the choices without repetitions; None if the structure is no choice."""
    if structure is None or structure.kind != "choice":
        return None
    choices = tuple(dict.fromkeys(structure.value))
    characters = sum(map(len, choices))
    if characters > MAX_CHOICE_CHARACTERS:
        raise RequestError(
            f"{structure.field}: the choices have {characters} characters together, at most"
            f" {MAX_CHOICE_CHARACTERS}",
            structure.field,
        )
    return choices


async def compile_structure(
    compiler: GrammarCompiler, options: GenerationOptions, model: ModelInfo, caller: Caller
) -> GenerationOptions:
    """Return the options with the compiled grammar, if there is one.

    Raises RequestError, OverloadError.
    """
    structure = options.structure
    if structure is None or structure.kind == "choice":
        return options
    name, text = structure.field, structure.value
    if not model.eos_token_ids:
        raise RequestError(f"{name}: the model has no token to end the answer with", name)
    if not isinstance(text, str):
        text = msgspec.json.encode(text).decode()
    if len(text) > MAX_GRAMMAR_SOURCE:
        raise RequestError(
            f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_SOURCE} are accepted", name
        )
    answer = await compiler.compile(CompileRequest(structure.kind, text, structure.before), caller)
    if answer.error:
        raise RequestError(f"{name}: {answer.error}", name)
    sampling = structs.replace(options.sampling, grammar=answer.grammar)
    return structs.replace(options, sampling=sampling)
