"""Grammars of structured output, by the library llguidance, and their limits.

    python -m models.text.grammar

The ingress compiles a grammar in this process, ranks compile what has compiled there. The process
reads a `CompilerSetup` and then `CompileRequest`s from standard input, a line of JSON each, and
writes a `CompileAnswer` for each of them. A compilation beyond its limits ends the process: the
library's own limits do not bound every grammar.

Masks have a bit per token: whether it may come next.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from models.text.json_schema import DEFINITIONS, MAX_DEPTH, SchemaError, prepare_schema, subschemas

# White space in JSON: a space or an indented line, so that a model cannot emit it without end
WHITE_SPACE: Final = r"(?: |\n[ \t]{0,40})"
# No \uXXXX: it could write the name of a property in another way
_ESCAPES: Final = 'nrbtf\\"'
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=10_000,  # for a mask: about 15 ms
    max_items_in_row=500,  # for a token: about 4 ms
    max_lexer_states=50_000,  # of 1 to 2 kB
    max_grammar_size=200_000,
    verbose_errors=False,
)
_MAX_ERROR_CHARACTERS = 300
_MAX_TRIED = 200  # subschemas compiled to find the place of an error


def grammar_tokenizer(tokenizer_json: str, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the library's form of a tokenizer. Raises ValueError if it cannot be used.

    Holds the interpreter lock: about 0.3 s for 50,000 tokens.
    """
    return LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))


def grammar_of(kind: str, text: str) -> str:
    """Return the serialised grammar of a source of kind json, regex or lark. Raises ValueError."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": _ESCAPES}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return llguidance.grammar_from("grammar", text)


def behind(before: str, kind: str, grammar: str) -> str:
    """Return the grammar of an answer behind what the start of a Lark rule describes."""
    if kind == "lark":
        listed = [{"lark_grammar": grammar}]
    else:
        listed = msgspec.json.decode(grammar)["grammars"]
    start = {"name": "start", "lark_grammar": f"start: {before} @answer"}
    grammars = [start, {**listed[0], "name": "answer"}, *listed[1:]]
    return msgspec.json.encode({"grammars": grammars}).decode()


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of a grammar. It may be in an error state; `error_of`."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def error_of(matcher: LLMatcher) -> str:
    """Return the error of a matcher in one line; empty without one."""
    error = one_line(matcher.get_error()) if matcher.is_error() else ""
    return "it accepts no text" if error == "NoExtensionBias" else error


def one_line(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    cut = line[:_MAX_ERROR_CHARACTERS]
    return cut if cut == line else f"{cut}..."


class CompileRequest(msgspec.Struct, frozen=True):
    """A source of kind json, regex or lark. before: see `behind`."""

    kind: str
    text: str
    before: str = ""


class CompileAnswer(msgspec.Struct, frozen=True):
    """A grammar, or the error of its source. is_final: False if another attempt may succeed."""

    grammar: str = ""
    error: str = ""
    is_final: bool = True


class CompilerSetup(msgspec.Struct, frozen=True):
    """First message to a compiling process."""

    tokenizer_json: str
    eos_token_ids: Sequence[int]
    timeout_s: float
    memory_bytes: int


_SETUP = msgspec.json.Decoder(CompilerSetup)
_REQUEST = msgspec.json.Decoder(CompileRequest)


def compile_source(tokenizer: LLTokenizer, request: CompileRequest) -> CompileAnswer:
    """Return the grammar, or what is wrong and where."""
    if request.kind != "json":
        return _compiled(tokenizer, request)
    try:
        schema = prepare_schema(json.loads(request.text))
    except RecursionError:
        return CompileAnswer(error=f"nested deeper than {MAX_DEPTH}")
    except SchemaError as error:
        return CompileAnswer(error=one_line(str(error)))
    except ValueError as error:
        return CompileAnswer(error=one_line(f"not valid JSON: {error}"))
    answer = _compiled(tokenizer, CompileRequest("json", json.dumps(schema), request.before))
    place = _place_of(tokenizer, schema, answer.error) if answer.error else ""
    return CompileAnswer(error=one_line(f"at {place}: {answer.error}")) if place else answer


def _compiled(tokenizer: LLTokenizer, request: CompileRequest) -> CompileAnswer:
    try:
        grammar = grammar_of(request.kind, request.text)
        if request.before:
            grammar = behind(request.before, request.kind, grammar)
    except ValueError as error:
        return CompileAnswer(error=one_line(str(error)))
    matcher = new_matcher(tokenizer, grammar)
    matcher.compute_bitmask()
    error_text = error_of(matcher)
    return CompileAnswer(error=error_text) if error_text else CompileAnswer(grammar)


def _place_of(tokenizer: LLTokenizer, schema: dict[str, Any], error: str) -> str:
    """Return the path of the innermost subschema that has this error alone."""
    place, tried = "", 0
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    candidates = subschemas(schema)
    while (found := next(candidates, None)) is not None and tried < _MAX_TRIED:
        tried += 1
        path, inner = found
        whole = json.dumps({**shared, **inner} if isinstance(inner, dict) else inner)
        if _compiled(tokenizer, CompileRequest("json", whole)).error == error:
            place += path
            candidates = subschemas(inner)
    return place


def _bound_memory(more_bytes: int) -> None:
    """Bound the memory that this process may allocate beyond what it has."""
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    lines = sys.stdin.buffer
    setup = _SETUP.decode(lines.readline())
    tokenizer, failure = None, ""
    try:
        tokenizer = grammar_tokenizer(setup.tokenizer_json, setup.eos_token_ids)
    except ValueError as error:
        failure = f"the model's tokenizer is not supported: {one_line(str(error))}"
    _bound_memory(setup.memory_bytes)
    for line in lines:
        request = _REQUEST.decode(line)
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s)  # its signal ends the process
        answer = CompileAnswer(error=failure)
        if tokenizer is not None:
            answer = compile_source(tokenizer, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
