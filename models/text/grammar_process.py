"""Process that compiles grammars within limits of time and memory.

    python -m models.text.grammar_process

Reads a `CompilerSetup` and then `CompileRequest`s from standard input, a line of JSON each, and
writes a `CompileAnswer` for each of them. A compilation beyond its limits ends the process: the
library's own limits do not bound every grammar.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer

from models.text.grammar import (
    CompileAnswer,
    CompileRequest,
    CompilerSetup,
    behind,
    error_of,
    grammar_of,
    grammar_tokenizer,
    new_matcher,
    one_line,
)
from models.text.json_schema import DEFINITIONS, MAX_DEPTH, SchemaError, prepare_schema, subschemas

_MAX_TRIED = 200  # subschemas compiled to find the place of an error
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
