"""All configuration keys: table of `tandem config`, and docs/configuration.md.

    python -m cluster.cli.config_page       # writes the page

A key's meaning is the string below its field in contracts/config.py.
"""

import ast
import inspect
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types
from rich.markup import escape
from rich.table import Table

from contracts.config import TandemConfig
from contracts.device_modes import MODES, Mode

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


TARGET = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
_HEAD = """# Configuration

All settings, with default, accepted values and meaning. This page is generated from the fields in
`contracts/config.py` (`python -m cluster.cli.config_page`); `tandem config` prints the same for one
configuration.

A configuration is one YAML or TOML file with these sections. `--set section.key=value` overrides a
setting, a named option such as `--model` overrides both, and the rest have their defaults. Unknown
keys and values out of bounds are rejected; the error names the nearest known key. Relative paths
are relative to the current folder. "–" is `null`: not set.
"""
_MODES = "The test of each mode on a device. The others are refused when the device is known."
_ROW = "| `{}` | {} | {} | {} |"


def page() -> str:
    kinds = {name: kind.cls for name, kind in sections()}
    parts = [_HEAD]
    for section, keys in groupby(
        config_keys(TandemConfig()), lambda key: key.key.partition(".")[0]
    ):
        parts += [
            "",
            f"## `{section}`",
            "",
            " ".join((inspect.getdoc(kinds[section]) or "").split()),
        ]
        parts += ["", "| key | default | takes | meaning |", "|---|---|---|---|"]
        parts += map(_row, keys)
    parts += ["", "## Modes by device", "", _MODES, "", "| mode | cpu | cuda |", "|---|---|---|"]
    for mode in MODES:
        parts.append(f"| `{mode.setting}` | {_cell(mode, 'cpu')} | {_cell(mode, 'cuda')} |")
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _cell(mode: Mode, device: str) -> str:
    tested = mode.cuda if device == "cuda" else mode.cpu
    return f"`{tested}`" if tested else f"refused: {mode.instead}"


def _row(key: ConfigKey) -> str:
    name = key.key.partition(".")[2]
    default = format_value(key.default) or '""'
    if name.endswith("_bytes") and key.default >= 1 << 20:
        default += f" ({key.default >> 20} MiB)"
    return _ROW.format(name, default, key.takes, key.meaning.replace("|", "\\|"))


def main() -> None:
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
