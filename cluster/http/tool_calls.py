"""Tools of a chat: what the model may call, and earlier calls as the template receives them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from cluster.http.cost import MemoryAccount, decoded_bytes
from cluster.http.schemas import ChatBody, Structure, Tool
from contracts.errors import RequestError
from models.text.answer_format import AnswerParser, CallListParser, NamedCallParser
from models.text.json_schema import below_root
from models.text.tokenizer import Tokenizer

_AT_ROOT = ("$schema", "$id")  # keywords with a meaning at the root of a schema only


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


def plain_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as the client wrote it."""
    function = {
        key: value
        for key, value in msgspec.structs.asdict(tool.function).items()
        if value is not None
    }
    return {"type": tool.type, "function": function}


class JsonArguments(dict[str, Any]):
    """Arguments of a tool call for a template: a mapping, and where text is expected their JSON."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def template_tool_call(place: str, call: dict[str, Any], account: MemoryAccount) -> dict[str, Any]:
    """Return a tool call for a template, which may walk through the arguments or print them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}: expected an object with function.name", "messages")
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    account.charge(decoded_bytes(text.encode("utf-8", "replace")))
    try:
        values = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        values = None
    if not isinstance(values, dict):  # a model's mistake: shown as it was written
        return call
    return {**call, "function": {**function, "arguments": JsonArguments(text, values)}}
