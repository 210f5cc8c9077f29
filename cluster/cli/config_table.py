"""Table of all configuration keys for `tandem config`.

A key's meaning is the string below its field in contracts/config.py.
"""

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import inspect as types
from rich.markup import escape
from rich.table import Table

from contracts.config import TandemConfig

_BOUNDS = {"ge": ">= ", "gt": "> ", "le": "<= ", "lt": "< "}


class ConfigKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key. value: in the configuration that is shown."""

    key: str
    value: Any
    default: Any
    takes: str
    meaning: str


def sections() -> Iterator[tuple[str, types.StructType]]:
    """Yield the name and the fields of each section."""
    kind = types.type_info(TandemConfig)
    assert isinstance(kind, types.StructType)
    for section in kind.fields:
        assert isinstance(section.type, types.StructType)
        yield section.name, section.type


def config_keys(config: TandemConfig) -> list[ConfigKey]:
    defaults, values = msgspec.to_builtins(TandemConfig()), msgspec.to_builtins(config)
    keys: list[ConfigKey] = []
    for section, kind in sections():
        meanings = _meanings(kind.cls)
        keys += (
            ConfigKey(
                key=f"{section}.{field.name}",
                value=_open(field.name, values[section][field.name]),
                default=defaults[section][field.name],
                takes=_takes(field.type),
                meaning=meanings.get(field.name, ""),
            )
            for field in kind.fields
        )
    return keys


def _open(name: str, value: Any) -> Any:
    """Return the value with secrets replaced."""
    if name == "api_keys":
        return ["…"] * len(value)
    return "…" if name in ("metrics_key", "operator_key") and value else value


def render_table(keys: list[ConfigKey]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "value", "takes", "meaning"):
        table.add_column(
            heading, overflow="fold", no_wrap=heading == "key"
        )  # keys stay whole, to be copied
    for key in keys:
        value = escape(format_value(key.value))
        if key.value != key.default:
            value = f"[bold]{value}[/] (default {escape(format_value(key.default))})"
        table.add_row(key.key, value, key.takes, key.meaning)
    return table


def format_value(value: Any) -> str:
    return "–" if value is None else msgspec.json.encode(value).decode().strip('"')


def _meanings(section: type) -> dict[str, str]:
    """Return the string below each field of a section's class, by field name."""
    (struct,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(struct, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in pairwise(struct.body):
        match field, below:
            case [ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text)))]:
                found[name] = " ".join(text.split())
    return found


def _takes(kind: types.Type) -> str:
    """Describe a type, for example "int >= 1" or "pack, spread"."""
    if isinstance(kind, types.Metadata):
        return _takes(kind.type)
    if isinstance(kind, types.UnionType):
        parts = [_takes(one) for one in kind.types if not isinstance(one, types.NoneType)]
        return " or ".join(parts) + (", or null" if len(parts) < len(kind.types) else "")
    if isinstance(kind, types.StructType):
        return f"{{{', '.join(field.name for field in kind.fields)}}}"
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
