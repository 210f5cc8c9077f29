"""The file of `http.keys_file`, which may change while the server runs.

Error messages never quote its contents, because they are logged.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import yaml

from contracts.api_keys import ApiKey, api_key, check_keys
from contracts.errors import ConfigError

MAX_KEYS_FILE_BYTES = 1 << 20


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of the file, as http.api_keys and http.metrics_key."""

    api_keys: list[str | ApiKey]
    metrics_key: str | None = None

    @property
    def clients(self) -> list[ApiKey]:
        return [api_key(each) for each in self.api_keys]

    def __post_init__(self) -> None:
        if not self.api_keys:
            raise ValueError("api_keys is empty: a server with a keys file is never open to all")
        check_keys(self.clients, self.metrics_key)


def read_keys(path: Path) -> Keys:
    """Read and validate the file. Raises ConfigError without any of its contents."""
    return decode_keys(keys_bytes(path), path)


def keys_bytes(path: Path) -> bytes:
    """Return the contents of the file. Raises ConfigError."""
    try:
        # Non-blocking: opening a pipe must not hang.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _invalid(path, "is not a file")
            data = file.read(MAX_KEYS_FILE_BYTES + 1)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_KEYS_FILE_BYTES:
        raise _invalid(path, f"has more than {MAX_KEYS_FILE_BYTES} bytes")
    return data


def decode_keys(data: bytes, path: Path) -> Keys:
    """Decode YAML or JSON. path: for messages. Raises ConfigError."""
    try:
        tree: Any = yaml.safe_load(data)
        return msgspec.convert(tree, Keys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise _invalid(path, f"not valid YAML{where}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = (
            _redacted(str(error))
            if isinstance(error, msgspec.ValidationError)
            else "not valid YAML"
        )
        raise _invalid(path, reason) from None


def _redacted(message: str) -> str:
    """Return a ValidationError's message without text from the file."""
    unknown = re.fullmatch(r"Object contains unknown field `.*?`(?: - at `\$(.*)`)?", message, re.S)
    if unknown is None:
        ours = re.sub(r"Invalid enum value '.*' - ", "Invalid enum value - ", message, flags=re.S)
        return ours.replace("`$.", "`").replace("`$`", "the whole")
    where = (unknown[1] or "").lstrip(".") or "the whole"
    kind: type = ApiKey if "api_keys" in where else Keys
    known = ", ".join(field.name for field in msgspec.structs.fields(kind))
    return f"an unknown field at {where}; known: {known}"


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError(f"http.keys_file={path}: {why}")
