"""A chat template in steps: messages to prompt text, as `transformers` renders it.

Templates and messages are untrusted: both stay in jinja2's immutable sandbox, and every template
error is an error about `messages`, never a crash.
"""

from __future__ import annotations

import json
import textwrap
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
MAX_SHOWN_CHARACTERS = 300  # of a template's error, which may quote a message
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # its space shows whether the template trims

# What a template is tried with. A list that it prints as it is shows also _UNREAD.
_TEXTS, _CALLED, _UNREAD = ("first0text", "second0text"), "called0function", "unread0key"
_TEXT = " ".join(_TEXTS)
_PARTS = [{"type": "text", "text": text, _UNREAD: ""} for text in _TEXTS]
_USER: Message = {"role": "user", "content": "C"}
_FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}
_BARE_TOOL = {"type": "function", "function": {"name": "f"}}


def _calling(content: str | None, arguments: object) -> Message:
    function = {"name": _CALLED, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


# By role: messages before and after one that is tried, in an order that templates accept.
_AROUND: dict[str, tuple[list[Message], list[Message]]] = {
    "system": ([], [_USER]),
    "developer": ([], [_USER]),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _calling("", {})], []),
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
        self._tried: dict[tuple[str, str, bool], bool] = {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None
        shown = [
            (len(text), content is None)
            for content in ("", None)
            for arguments in (dict[str, object](), "{}")
            if _CALLED in (text := self._try([_USER, _calling(content, arguments)], [_TOOL]))
        ]
        # DeepSeek's templates show calls only, or without an empty turn, beside None
        self._empty_is_none = min(shown, default=(0, False))[1]
        bare, whole = (self._try([_USER], [tool]) for tool in (_BARE_TOOL, _TOOL))
        self._needs_whole_tools = bool(whole) and not bare

    def _context(
        self, messages: Sequence[Message], variables: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the template's variables.

        As in `transformers`, keys with the value None are omitted, and `variables` override special
        tokens. A `developer` message becomes `system` if the template has no such role or does not
        show it.
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
        tools: Any = variables.get("tools")
        has_tools = bool(tools)
        if has_tools and self._needs_whole_tools:  # OpenAI's may lack a description or parameters
            whole = [{**tool, "function": {**_FUNCTION, **tool["function"]}} for tool in tools]
            variables = {**variables, "tools": whole}
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
            reason = textwrap.shorten(str(error), MAX_SHOWN_CHARACTERS)
            raise RequestError(f"the chat template refuses this: {reason}", "messages") from None
        text = "".join(pieces)
        return _before_mark(text) if continues else text

    def _plain(self, message: Message, has_tools: bool) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        role, content = plain.get("role", ""), plain.get("content")
        if role == "developer" and not (
            self.has_developer_role and self._shows(role, _TEXT, has_tools)
        ):
            plain["role"] = role = "system"
        if isinstance(content, list) and not self._shows(role, _PARTS[: len(content)], has_tools):
            plain["content"] = "\n".join(part["text"] for part in content)
        if self._empty_is_none and plain.get("tool_calls") and content == "":
            plain["content"] = None
        return plain

    def _shows(self, role: str, content: str | list[Any], has_tools: bool) -> bool:
        """Return whether a message of `role` shows its content, one of ours; tried once.

        has_tools: with tools, a template may treat a message in another way (Llama 4).
        """
        key = role, str(content), has_tools
        if key not in self._tried:
            before, after = _AROUND.get(role, ([], []))
            message = {"role": role, "content": content, "tool_call_id": "call00000"}
            messages = [*before, message, *after]
            shown = self._try(messages, [_TOOL] if has_tools else None)
            texts = [text for text in _TEXTS if text in key[1]]
            self._tried[key] = all(text in shown for text in texts) and _UNREAD not in shown
        return self._tried[key]

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """Return the prompt of `messages`; empty if the template refuses them."""
        try:
            return self._template.render(self._context(messages, {"tools": tools}))
        except _TEMPLATE_FAULTS:
            return ""


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
