"""Typed reading of config.json: each wrong field is one CheckpointError that names it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from contracts.errors import CheckpointError


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
        if value is None:
            value = default
        if value is None:
            raise self.error(keys[0], "missing; a positive integer is needed")
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # the same in each layer
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(keys[0], f"expected a positive integer, got {value!r}")
        return value

    def count(self, key: str, *, default: int) -> int:
        """Return an integer of 0 or more."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(key, f"expected an integer of 0 or more, got {value!r}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        value = self.raw(*keys)
        if value is None:
            value = default
        if value is None:
            raise self.error(keys[0], "missing; a number is needed")
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(keys[0], f"expected a positive number, got {value!r}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {value!r}")
        return value

    def int_list(self, key: str) -> list[int]:
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, f"expected a list of integers, got {value!r}")
        return value

    def token_ids(self, key: str) -> list[int]:
        """Return a token id or a list of them as a list."""
        value = self.raw(key)
        return [value] if type(value) is int else self.int_list(key)
