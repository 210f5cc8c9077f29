"""A chat template in steps: messages to prompt text, as `transformers` renders it.

Templates and messages are untrusted: both stay in jinja2's immutable sandbox, and every template
error is an error about `messages`, never a crash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import CheckpointError, RequestError, TooLongError

Result = TypeVar("Result")

PIECE_CHARACTERS = 1 << 18  # per step: a fraction of a second
PIECE_TEXTS = 64

# Yields the number of kept tokens after each step, and returns the result.
EncodingSteps = Generator[int, None, Result]
Charge = Callable[[int], None]


def finish(steps: EncodingSteps[Result], charge: Charge | None = None) -> Result:
    """Run all steps. charge: called with the tokens of each step."""
    while True:
        try:
            tokens = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if charge is not None:
            charge(tokens)


def pieces_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of up to PIECE_TEXTS texts and PIECE_CHARACTERS; a longer text by itself."""
    piece: list[str] = []
    characters = 0
    for text in texts:
        if piece and (len(piece) == PIECE_TEXTS or characters + len(text) > PIECE_CHARACTERS):
            yield piece
            piece, characters = [], 0
        piece.append(text)
        characters += len(text)
    if piece:
        yield piece


Message = Mapping[str, Any]

STEP_PIECES = 1000
MAX_REPEATED = 1 << 20  # entries of a string or list that a template multiplies
MAX_EXPONENT = 64
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # its space shows whether the template trims

_TESTS_FOR_NONE = re.compile(r"content['\"]?\]? is none")
_USER: Message = {"role": "user", "content": "C"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
# By role: messages before and after one with text parts, in an order that templates accept.
_AROUND_PARTS: dict[str, tuple[list[Message], list[Message]]] = {
    "system": ([], [_USER]),
    "developer": ([], [_USER]),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _CALLING], []),
}
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks training text, and renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """A compiled template with its special tokens (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.has_developer_role = "developer" in source
        self.has_tools = "tools" in source
        self._takes: dict[tuple[str, bool], bool] = {}  # parts, by role and whether with tools
        self._tests_for_none = _TESTS_FOR_NONE.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None

    def _context(
        self, messages: Sequence[Message], variables: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the template's variables.

        As in `transformers`, keys with the value None are omitted, and `variables` override special
        tokens. A `developer` message becomes `system` if the template has no such role (most would
        drop it).
        """
        return {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **variables,
            "messages": messages,
        }

    def render_steps(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        max_characters: int | None = None,
    ) -> EncodingSteps[str]:
        """Render the prompt up to the assistant's turn, in steps of STEP_PIECES pieces of text.

        The variable continue_final_message ends it behind the last message's text, as in
        `transformers`. Raises RequestError about `messages`, TooLongError for more than
        max_characters.
        """
        has_tools = bool(variables.get("tools"))
        shown = [self._plain(message, has_tools) for message in messages]
        continues = variables.get("continue_final_message")
        if continues:
            shown[-1]["content"] = _with_mark(shown[-1].get("content"))
        pieces: list[str] = []
        characters = 0
        try:
            for piece in self._template.generate(self._context(shown, variables)):
                pieces.append(piece)
                characters += len(piece)
                if max_characters is not None and characters > max_characters:
                    raise TooLongError(
                        f"messages: the prompt that the chat template makes has more than"
                        f" {max_characters} characters, which is what the model's context can"
                        " hold: shorten them",
                        "messages",
                    )
                if len(pieces) % STEP_PIECES == 0:
                    yield 0
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the chat template refuses this: {error}", "messages") from None
        text = "".join(pieces)
        return _before_mark(text) if continues else text

    def _plain(self, message: Message, has_tools: bool) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self.has_developer_role:
            plain["role"] = "system"
        content = plain.get("content")
        if isinstance(content, list) and not self._takes_parts(plain.get("role", ""), has_tools):
            plain["content"] = "\n".join(part["text"] for part in content)
        if self._tests_for_none and plain.get("tool_calls") and plain.get("content") == "":
            plain["content"] = None  # DeepSeek's templates show calls only then
        return plain

    def _takes_parts(self, role: str, has_tools: bool) -> bool:
        """Return whether messages of `role` show text parts as one text; tried once.

        has_tools: with tools, a template may treat a message in another way (Llama 4).
        """
        key = role, has_tools
        if key not in self._takes:
            parts = [{"type": "text", "text": text} for text in ("A", "B")]
            before, after = _AROUND_PARTS.get(role, ([], []))
            with_text, with_parts = (
                [*before, {"role": role, "content": content}, *after] for content in ("AB", parts)
            )
            variables = self._context([], {"tools": [_TOOL]} if has_tools else {})
            try:
                expected = self._template.render({**variables, "messages": with_text})
                shown = self._template.render({**variables, "messages": with_parts})
                self._takes[key] = shown == expected
            except _TEMPLATE_FAULTS:
                self._takes[key] = False
        return self._takes[key]


def _with_mark(content: Any) -> Any:
    """Return the content of a message with END_MARK behind its text."""
    if isinstance(content, str):
        return content + END_MARK
    if not content:
        raise RequestError("continue_final_message: the last message has no text", "messages")
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + END_MARK}]


def _before_mark(text: str) -> str:
    before, found, after = text.rpartition(END_MARK.rstrip())
    if not found:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message", "messages"
        )
    return before if after.startswith(" ") else before.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """Bounds products: factors may come from a client (`chat_template_kwargs`, a message)."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"an exponent of {right} is above {MAX_EXPONENT}")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, Sequence) and len(many) * times > MAX_REPEATED:
                raise SecurityError(f"{len(many)} entries {times} times: at most {MAX_REPEATED}")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without jinja2's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
