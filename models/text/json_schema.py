"""JSON schemas ahead of their compilation.

The library reads a few keywords otherwise than the specification: these are restated in keywords
that it reads as meant, or rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64  # of nested objects and arrays of a schema
DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *DEFINITIONS)
_DATA = ("const", "enum", "default", "examples")
_COMBINED = ("allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties")
_OPEN = ("additionalProperties", "patternProperties", "minProperties")
_NO_FORMATS = (  # of the specification, but not of the library; all others mean nothing
    *("uri-reference", "iri", "iri-reference", "uri-template", "idn-email", "idn-hostname"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    *_NO_FORMATS,
)
_LEAP_YEAR = "(..(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"(....-(0[^2]|1.)|....-02-([01]|2[^9])|{_LEAP_YEAR}-02-29)"
_RESTRICTED = {  # what the library's formats accept and the specification does not
    "date": f"^{_DATE}",
    "time": "^..:..:[0-5]",  # no leap seconds
    "date-time": f"^{_DATE}.*[Tt ]..:..:[0-5]",
    "email": "^[^@]{1,64}@",
}
# Without \uXXXX (`_ESCAPES` in grammar.py) the library would leave out single control characters
_CONTROL = r"(?:[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[av]|\\c.|\\(?:x|u00|[xu]\{0*)(?:[01][^}]|7[fF])\}?)"
_IN_CLASS = re.compile(rf"\[\^(?:\\.|[^\]\\])*\]|{_CONTROL}-{_CONTROL}", re.DOTALL)  # no matter
_IN_PATTERN = re.compile(rf"{_CONTROL}|\[\^(?:\]|--)", re.DOTALL)
# A negated class without " or \\ accepts their escapes, unless it is without control characters too
_RESTATED = re.compile(
    r"\\P(\{[^}]*\}|[^{])|\[:\^(\w+):\]|\[\^(?!\]|--)|\\p\{digit\}|\\.", re.DOTALL
)
_NO_CONTROL = r"[^[\x00-\x07]"
_SPACE = r"\t\n\v\f\r \u00a0\u2028\u2029\ufeff\p{Zs}"
_ECMASCRIPT = {  # classes that the library's dialect takes otherwise
    r"\d": "[0-9]",
    r"\w": "[0-9A-Z_a-z]",
    r"\s": f"[{_SPACE}]",
    r"\p{digit}": r"\p{Nd}",
    r"\D": f"{_NO_CONTROL}0-9]",
    r"\W": f"{_NO_CONTROL}0-9A-Z_a-z]",
    r"\S": f"{_NO_CONTROL}{_SPACE}]",
}
_IN_JSON = re.compile(r"\\u00|\x7f")


class SchemaError(ValueError):
    """Reason why a schema is rejected, with the place in it."""


def prepare_schema(schema: Any) -> dict[str, Any]:
    """Return the schema as the library reads it as meant. Raises SchemaError.

    Objects with named properties get no others, as of vLLM and llama.cpp: models ramble there.
    """
    place = _too_deep(schema)
    if place:
        raise SchemaError(f"nested deeper than {MAX_DEPTH} at {place}")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("false accepts no text" if schema is False else "expected an object")
    if "x-guidance" in schema:
        raise SchemaError("at /x-guidance: not supported")
    prepared: dict[str, Any] = _prepared(schema, "", are_names=False)
    if not _is_combined(schema):
        _close_objects(prepared)
    return prepared


def _is_combined(value: Any) -> bool:
    """Return whether one object may have to match several schemas."""
    if not isinstance(value, dict):
        return isinstance(value, list) and any(map(_is_combined, value))
    keys = (*_COMBINED, "$ref", "anyOf") if "properties" in value else _COMBINED
    return any(key in value for key in keys) or any(map(_is_combined, value.values()))


def _close_objects(schema: dict[str, Any]) -> None:
    names, required = schema.get("properties"), schema.get("required")
    required = set(map(str, required)) if isinstance(required, list) else set()
    is_open = any(key in schema for key in _OPEN)
    if isinstance(names, dict) and required <= names.keys() and not is_open:
        schema["additionalProperties"] = False
    for place, inner in subschemas(schema):
        if isinstance(inner, dict) and place.split("/")[1] not in _DATA:
            _close_objects(inner)


def below_root(schema: Any, root: str, *, are_names: bool = False) -> Any:
    """Return a schema that is placed at `root` of another one, with its local references."""
    if isinstance(schema, list):
        return [below_root(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value
        if key in _DATA and not are_names
        else below_root(value, root, are_names=key in _NAMED and not are_names)
        for key, value in schema.items()
    }
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#{root}{target[1:]}"
    return moved


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of what may be a schema directly inside another one.

    Definitions are first: references to them have their errors, too.
    """
    items = schema.items() if isinstance(schema, dict) else ()
    for key, value in sorted(items, key=lambda item: item[0] not in DEFINITIONS):
        if key in _NAMED and isinstance(value, dict):
            yield from ((f"/{key}/{name}", inner) for name, inner in value.items())
        elif isinstance(value, dict):
            yield f"/{key}", value
        elif isinstance(value, list):
            yield from ((f"/{key}/{i}", x) for i, x in enumerate(value) if isinstance(x, dict))


def _prepared(value: Any, place: str, *, are_names: bool) -> Any:
    """Return a part of a schema, prepared. are_names: its keys are names of schemas."""
    if isinstance(value, list):
        return [_prepared(x, f"{place}/{i}", are_names=False) for i, x in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not are_names:
        value = _with_exact_format(value)
        _check(value, place)
        value = _with_restated_patterns(value)
    return {
        key: inner
        if key in _DATA and not are_names
        else _prepared(inner, f"{place}/{key}", are_names=key in _NAMED and not are_names)
        for key, inner in value.items()
    }


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    form, others = schema.get("format"), schema.get("allOf", [])
    if isinstance(form, str) and form not in _FORMATS:
        return {key: value for key, value in schema.items() if key != "format"}
    if not isinstance(form, str) or form not in _RESTRICTED or not isinstance(others, list):
        return schema
    return {**schema, "allOf": [*others, {"pattern": _RESTRICTED[form]}]}


def _with_restated_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Restate classes as of ECMAScript, and without control characters, which are never written."""
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema = {**schema, "pattern": _RESTATED.sub(_restated, pattern)}
    if isinstance(named, dict):
        restated = {_RESTATED.sub(_restated, key): value for key, value in named.items()}
        schema = {**schema, "patternProperties": restated}
    return schema


def _restated(match: re.Match[str]) -> str:
    if match[0] == "[^":
        return _NO_CONTROL
    if match[1]:
        return rf"{_NO_CONTROL}\p{match[1]}]"
    if match[2]:
        return f"{_NO_CONTROL}[:{match[2]}:]]"
    return _ECMASCRIPT.get(match[0], match[0])


def _check(schema: dict[str, Any], place: str) -> None:
    """Raise SchemaError for what the library does not enforce in full."""
    target = schema.get("$ref")
    is_local = not place and str(target).startswith("#")
    if isinstance(schema.get("$id"), str) and isinstance(target, str) and not is_local:
        raise SchemaError(f"at {place}/$id: not supported beside $ref")
    required = schema.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > len(names) + 1:  # a name may occur twice
        raise SchemaError(
            f"at {place}/minProperties: {least} is more than the {len(names)} required names plus"
            " one: name the others in `required`"
        )
    for key in ("const", "enum", "pattern", "patternProperties"):
        if key in schema and _needs_control(key, schema[key]):
            raise SchemaError(f"at {place}/{key}: control characters and [^] are not supported")


def _needs_control(key: str, value: Any) -> bool:
    if key in ("const", "enum"):
        text = json.dumps(value, ensure_ascii=False)
        return _IN_JSON.search(text.replace("\\\\", "")) is not None
    patterns = value if isinstance(value, dict) else [value]
    return any(isinstance(x, str) and _IN_PATTERN.search(_IN_CLASS.sub("", x)) for x in patterns)


def _too_deep(schema: Any) -> str:
    """Return the place of a value below MAX_DEPTH containers; empty without one."""
    waiting = [("", schema, 0)]
    while waiting:
        place, value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return place
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{place}/{key}", item, depth + 1) for key, item in items]
    return ""
