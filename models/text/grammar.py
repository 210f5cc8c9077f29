"""Grammars of structured output, by the library llguidance, and their limits.

The ingress compiles a grammar in a separate process (`grammar_process.py`), ranks compile what has
compiled there. Masks have a bit per token: whether it may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

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
