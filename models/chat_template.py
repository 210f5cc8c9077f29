"""A checkpoint's chat template: messages in, prompt text out, as `transformers` renders it.

Templates come with the checkpoint, messages from strangers: both stay inside jinja2's immutable
sandbox, and whatever a template raises is an error about `messages`, never a crash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

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
    """`{% generation %} ... {% endgeneration %}` marks training text; here it is its own body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """A compiled template with the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.knows_developer_role = "developer" in source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None

    def render(self, messages: Sequence[Message], **variables: object) -> str:
        """The prompt up to where the assistant speaks. Raises RequestError about `messages`.

        As in `transformers`, keys whose value is None are left out, and `variables` override the
        special tokens. A `developer` message becomes `system` for a template that has no such role
        (most would drop it without a word).
        """
        context = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **variables,
            "messages": [self._plain(message) for message in messages],
        }
        try:
            return self._template.render(context)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the chat template refuses this: {error}", "messages") from None

    def _plain(self, message: Message) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self.knows_developer_role:
            plain["role"] = "system"
        return plain


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
    """JSON without jinja2's own HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
