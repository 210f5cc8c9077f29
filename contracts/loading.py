"""Loading of a configuration file and `a.b=c` overrides into a `TandemConfig`."""

import difflib
import enum
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from contracts.config import TandemConfig
from contracts.errors import ConfigError


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> TandemConfig:
    """Load the configuration in `path` (YAML or TOML; None: defaults) and apply `a.b=c` overrides.

    Raises ConfigError: one line with the key, and the nearest known key for a typo.
    """
    tree = _read(path) if path is not None else {}
    for override in overrides:
        _apply(tree, override)
    return config_from(tree, source=str(path) if path else "configuration")


def config_from(tree: dict[str, Any], *, source: str) -> TandemConfig:
    """Convert `tree` to a TandemConfig. Raises ConfigError."""
    _check_keys(tree, TandemConfig, source, prefix="")
    try:
        return msgspec.convert(tree, TandemConfig)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", "`")
        raise ConfigError(f"{source}: {message}{_choices(message)}") from None


def _choices(message: str) -> str:
    """Return the accepted values of an enum field, which msgspec's message lacks."""
    field = re.fullmatch(r"Invalid enum value .* - at `([\w.]+)`", message)
    if field is None:
        return ""
    kind: Any = TandemConfig
    for key in field[1].split("."):
        kind = typing.get_type_hints(kind)[key]
    choices = list(kind) if isinstance(kind, enum.EnumMeta) else typing.get_args(kind)
    return f"; choose {', '.join(str(choice) for choice in choices)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections with keys, got {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, raw = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected section.key=value")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {key} is not a section")
    try:
        tree[keys[-1]] = yaml.safe_load(raw)
    except yaml.YAMLError:
        tree[keys[-1]] = raw


def _check_keys(tree: dict[str, Any], struct: type, source: str, prefix: str) -> None:
    """Raise ConfigError for the first unknown key, with the nearest known one."""
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}")
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            _check_keys(value, kind, source, prefix=f"{prefix}{key}.")
