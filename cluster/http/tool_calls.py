"""Tools of a chat: what the model may call, and earlier calls as the template receives them."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.http.cost import MemoryAccount, decoded_bytes
from cluster.http.errors import UnsupportedFieldError
from cluster.http.schemas import ChatBody, Tool
from contracts.errors import RequestError
from models.text.tokenizer import Tokenizer


def requested_tools(body: ChatBody, tokenizer: Tokenizer) -> list[Tool]:
    """Return the tools that the model may call. Raises RequestError."""
    choice = body.tool_choice
    if choice is not None and not body.tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice needs tools", "tool_choice")
    if not body.tools or choice == "none":
        return []
    if choice not in (None, "auto"):
        raise UnsupportedFieldError(
            f"tool_choice={choice!r} is not supported, only auto and none", "tool_choice"
        )
    if not tokenizer.has_tools:
        raise RequestError("this model's chat template has no tool calls: leave tools out", "tools")
    return body.tools


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
