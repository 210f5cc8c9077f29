"""Text of tool calls in the formats of model families, to names and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Schemas = Mapping[str, Mapping[str, Any]]  # parameters of each tool
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FENCE = re.compile(r"\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def in_string(text: str) -> bool:
    """Return whether JSON that begins in `text` ends within a string."""
    start = min((at for mark in "{[" if (at := text.find(mark)) >= 0), default=len(text))
    if text.lstrip().startswith("<function=") or "<arg_key>" in text[:start]:
        return False
    return '"' in _STRING.sub("", text[start:])


def read_calls(body: str, tools: Schemas) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON) of each call between the tags; none if it is malformed."""
    text = body.strip()
    if text.startswith(("{", "[")) and (calls := _json_calls(text)):
        return calls
    if (function := _FUNCTION.match(text)) is not None:
        name = function[1].strip()
        return [(name, _typed(_PARAMETER.findall(function[2]), tools.get(name, {})))]
    if "<arg_key>" in text:
        name = text.partition("<arg_key>")[0].strip()
        return [(name, _typed(_PAIR.findall(text), tools.get(name, {})))]
    call_id, found, rest = text.partition("<|tool_call_argument_begin|>")
    if found:  # Kimi-K2: functions.NAME:NUMBER
        return _separated(call_id.partition(":")[0].rpartition(".")[2], rest)
    for separator in ("<｜tool▁sep｜>", "[ARGS]"):
        head, found, rest = text.partition(separator)
        if found:
            return _separated(head, rest)
    return []


def _separated(head: str, rest: str) -> list[tuple[str, str]]:
    name, arguments = head.partition("[CALL_ID]")[0].strip(), rest.strip()
    if name == "function":  # DeepSeek-V3: function<sep>NAME\n```json\n...\n```
        name, _, arguments = arguments.partition("\n")
    fence = _FENCE.fullmatch(arguments)
    arguments = fence[1] if fence else arguments.strip()
    return [(name.strip(), arguments)] if _loads(arguments) is not None else []


def _json_calls(text: str) -> list[tuple[str, str]]:
    tree = _loads(text)
    calls = []
    for each in tree if isinstance(tree, list) else [tree]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments = each.get("arguments", each.get("parameters"))
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        calls.append((each["name"], arguments))
    return calls


def _typed(pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Values are text; what the schema does not call a string is JSON."""
    properties = schema.get("properties")
    values: dict[str, Any] = {}
    for key, text in pairs:
        stated = properties.get(key.strip()) if isinstance(properties, dict) else None
        kinds = _types(stated)
        is_text = "string" in kinds and not ("null" in kinds and text.strip() == "null")
        value = None if is_text else _loads(text.strip())
        values[key.strip()] = (
            text if value is None and (is_text or text.strip() != "null") else value
        )
    return msgspec.json.encode(values).decode()


def _types(schema: Any) -> set[Any]:
    """Return the types that a schema, or an alternative of it, names."""
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    found = {
        *filter(
            lambda each: isinstance(each, str), stated if isinstance(stated, list) else [stated]
        )
    }
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            found |= _types(each)
    return found


def _loads(text: str) -> Any:
    """Return the JSON value, or None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
