"""Every key of the configuration, with its default, what it takes, and what it means.

Meanings stand in the docstrings of contracts/config.py: "key: text", or "key, other: text".
"""

from __future__ import annotations

import inspect
import re
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import inspect as types
from rich.table import Table

from contracts.config import TandemConfig

_BOUNDS = {"ge": ">= ", "gt": "> ", "le": "<= ", "lt": "< "}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """value: in the configuration that was asked about."""

    key: str
    value: Any
    default: Any
    takes: str
    meaning: str


def keys_of(config: TandemConfig) -> list[Key]:
    """In the order of the sections."""
    kind = types.type_info(TandemConfig)
    assert isinstance(kind, types.StructType)
    defaults, values = msgspec.to_builtins(TandemConfig()), msgspec.to_builtins(config)
    return [
        Key(
            key=f"{section.name}.{field.name}",
            value=_open(field.name, values[section.name][field.name]),
            default=defaults[section.name][field.name],
            takes=_takes(field.type),
            meaning=meaning,
        )
        for section in kind.fields
        if isinstance(section.type, types.StructType)
        for field, meaning in zip(section.type.fields, _meanings(section.type), strict=True)
    ]


def _open(name: str, value: Any) -> Any:
    """The value, but of API keys only how many there are."""
    if name == "api_keys":
        return ["…"] * len(value)
    return "…" if name == "metrics_key" and value else value


def table_of(keys: list[Key]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "value", "takes", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "key")  # to be copied
    for key in keys:
        shown = _shown(key.value)
        changed = key.value != key.default
        value = f"[bold]{shown}[/] (default {_shown(key.default)})" if changed else shown
        table.add_row(key.key, value, key.takes, key.meaning)
    return table


def _shown(value: Any) -> str:
    text = "–" if value is None else msgspec.json.encode(value).decode()
    return text.strip('"').replace("[", r"\[")


def _meanings(section: types.StructType) -> list[str]:
    """One for each field; empty where the docstring has none."""
    text = " ".join((inspect.getdoc(section.cls) or "").split())
    names = [field.name for field in section.fields]
    one = rf"(?:{'|'.join(sorted(names, key=len, reverse=True))})"
    found = list(re.finditer(rf"(?:^|(?<=[.;)] ))({one}(?:, {one})*(?: and {one})?):? ", text))
    told: dict[str, str] = {}
    for here, there in zip_longest(found, found[1:]):
        meaning = text[here.end() : there.start() if there else len(text)].strip(" ;")
        for name in re.findall(one, here[1]):
            told.setdefault(name, meaning)
    return [told.get(name, "") for name in names]


def _takes(kind: types.Type) -> str:
    """As "int >= 1" or "pack, spread"."""
    if isinstance(kind, types.Metadata):
        return _takes(kind.type)
    if isinstance(kind, types.UnionType):
        parts = [_takes(one) for one in kind.types if not isinstance(one, types.NoneType)]
        return f"{' or '.join(parts)}, or null"
    if isinstance(kind, types.LiteralType):
        return ", ".join(str(value) for value in kind.values)
    if isinstance(kind, types.EnumType):
        return ", ".join(str(one.value) for one in kind.cls)
    if isinstance(kind, types.ListType):
        return f"list of {_takes(kind.item_type)}"
    if isinstance(kind, types.DictType):
        return f"names with {_takes(kind.value_type)}"
    name = type(kind).__name__.removesuffix("Type").lower()
    bounds = [
        f"{sign}{getattr(kind, field)}"
        for field, sign in _BOUNDS.items()
        if getattr(kind, field, None) is not None
    ]
    return " ".join([name, ", ".join(bounds)]).strip()
