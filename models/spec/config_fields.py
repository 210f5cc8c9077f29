"""Typed reading of config.json: each wrong field is one CheckpointError that names it.

Configurations of well-known models are shipped, so that plans need no download: figures of the
published files, without fields that `ModelSpec` does not read. The factors of longrope, on which no
plan depends, are 1.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from contracts.errors import CheckpointError

_KNOWN_MODELS = Path(__file__).with_name("known_models.json")
_CONFIGS = msgspec.json.Decoder(dict[str, dict[str, Any]])  # by hub id


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises CheckpointError."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; download it again") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


T = TypeVar("T")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_positive_int(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class ConfigFields:
    """Fields of one JSON object. Several keys are spellings of one field.

    The first spelling that is present counts, and spellings of one size must agree. A null counts
    as absent, except where `transformers` treats it as a value: readers then check `is_null`.
    """

    def __init__(
        self,
        path: Path,
        tree: dict[str, Any],
        prefix: str = "",
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        """Set up fields. spellings: the key in the file, by that in `tree`, if they differ."""
        self.path = path
        self._tree = tree
        self._prefix = prefix
        self._spellings = spellings or {}

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self._prefix}{self._spellings.get(key, key)}: {message}"
        )

    def renamed(self, aliases: Iterable[tuple[str, str]]) -> ConfigFields:
        """Return the fields with usual names. Raises CheckpointError if both names differ."""
        tree, spellings = dict(self._tree), dict[str, str]()
        for alias, usual in aliases:
            if alias in tree:
                value = tree.pop(alias)
                if tree.setdefault(usual, value) != value:
                    raise self.error(alias, f"{value!r}, but {usual} is {tree[usual]!r}; keep one")
                spellings[usual] = alias
        return ConfigFields(self.path, tree, self._prefix, spellings)

    def has(self, key: str) -> bool:
        return self._tree.get(key) is not None

    def is_present(self, key: str) -> bool:
        """Return whether the key is present, possibly with null."""
        return key in self._tree

    def is_null(self, key: str) -> bool:
        return self.is_present(key) and self._tree[key] is None

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._tree.items()

    def raw(self, *keys: str) -> Any:
        for key in keys:
            if self._tree.get(key) is not None:
                return self._tree[key]
        return None

    def section(self, *keys: str) -> ConfigFields:
        """Return the object under the first of `keys` that is present, or an empty one."""
        for key in keys:
            if self.has(key):
                if not isinstance(self._tree[key], dict):
                    raise self.error(key, f"expected an object, got {self._tree[key]!r}")
                return ConfigFields(self.path, self._tree[key], f"{self._prefix}{key}.")
        return ConfigFields(self.path, {}, f"{self._prefix}{keys[0]}.")

    def unsupported(self, key: str, supported: Iterable[str]) -> CheckpointError:
        known = ", ".join(supported)
        return self.error(key, f"{self.raw(key)!r} is not supported; supported: {known}")

    def with_section(self, key: str) -> ConfigFields:
        """Return the fields of the object under `key`, and those beside it that it lacks."""
        inner = dict(self.section(key).items())
        beside = {name: value for name, value in self._tree.items() if name != key}
        return ConfigFields(self.path, beside | inner, self._prefix)

    def positive_int(self, *keys: str, default: int | None = None) -> int:
        value = self.raw(*keys)
        for key in keys:
            if self.has(key) and self._tree[key] != value:
                raise self.error(
                    key, f"{self._tree[key]!r}, but another spelling of it says {value!r}; keep one"
                )
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # the same in each layer
        return self._checked(keys[0], value, default, "a positive integer", _is_positive_int)

    def count(self, key: str, *, default: int) -> int:
        """Return an integer of 0 or more."""
        value, expected = self.raw(key), "an integer of 0 or more"
        return self._checked(key, value, default, expected, lambda n: n == 0 or _is_positive_int(n))

    def number(self, key: str, *, default: float | None = None) -> float:
        return float(self._checked(key, self.raw(key), default, "a positive number", _is_positive))

    def boolean(self, key: str, *, default: bool) -> bool:
        return self._checked(
            key, self.raw(key), default, "true or false", lambda b: type(b) is bool
        )

    def int_list(self, key: str) -> list[int]:
        value, expected = self.raw(key), "a list of integers"
        return self._checked(key, value, list[int](), expected, _is_int_list)

    def _checked(
        self,
        key: str,
        value: Any,
        default: T | None,
        expected: str,
        is_valid: Callable[[Any], bool],
    ) -> T:
        """Return a value, or the default without one."""
        value = default if value is None else value
        if value is None:
            raise self.error(key, f"missing; {expected} is needed")
        if not is_valid(value):
            raise self.error(key, f"expected {expected}, got {value!r}")
        return cast(T, value)

    def token_ids(self, key: str) -> list[int]:
        """Return a token id or a list of them as a list."""
        value = self.raw(key)
        return [value] if type(value) is int else self.int_list(key)


def find_known_model(name: str) -> dict[str, Any] | None:
    """Return the config.json fields of a hub id or its last part, in any case, or None."""
    wanted = name.lower()
    for hub_id, config in _known_configs().items():
        if wanted in (hub_id.lower(), _short(hub_id).lower()):
            return config
    return None


def known_model_names() -> list[str]:
    """Short names, as `find_known_model` accepts them."""
    return list(map(_short, _known_configs()))


def _short(hub_id: str) -> str:
    return hub_id.partition("/")[2].removesuffix("-v0.1")


@functools.cache
def _known_configs() -> dict[str, dict[str, Any]]:
    return _CONFIGS.decode(_KNOWN_MODELS.read_bytes())
