"""Bearer tokens: their permissions, their checks, and the file of `http.keys_file`.

Error messages name the position of a key, never the key, and never quote the file, because they are
logged. The file may change while the server runs.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from contracts.errors import ConfigError

MAX_KEY_CHARACTERS = 200  # must fit into the smallest max_header_bytes

Rate = Annotated[float, Meta(gt=0, le=1e9)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bearer token and its permissions.

    priority: class of requests that name none. fixed_priority: requests may not name another class.
    tenant: keys of one tenant share their turns; None: the key is a tenant of its own.
    requests_per_s, tokens_per_s: long-term rates; concurrency: simultaneous requests; None: no
    limit.
    """

    key: str
    priority: Literal["ls", "be"] = "ls"
    tenant: str | None = None
    fixed_priority: bool = False
    requests_per_s: Rate | None = None
    tokens_per_s: Rate | None = None
    concurrency: Annotated[int, Meta(ge=1)] | None = None


def api_key(given: str | ApiKey) -> ApiKey:
    return ApiKey(given) if isinstance(given, str) else given


def check_keys(api_keys: Sequence[ApiKey], metrics_key: str | None) -> None:
    """Raise ValueError if a key is empty, too long, repeated, or cannot be sent in a header."""
    keys = [each.key for each in api_keys]
    for index, key in enumerate(keys):
        _check_key(f"api_keys[{index}]", key)
        if api_keys[index].tenant == "":
            raise ValueError(f"api_keys[{index}].tenant is empty: remove it, or give a name")
        first = keys.index(key)
        if first < index:
            raise ValueError(f"api_keys[{index}] is the same as api_keys[{first}]: remove one")
    if metrics_key is not None:
        _check_key("metrics_key", metrics_key)


def check_operator_key(operator_key: str | None, others: Sequence[str | None]) -> None:
    """Raise ValueError if the operator key is invalid or equal to another key."""
    if operator_key is None:
        return
    _check_key("operator_key", operator_key)
    if operator_key in others:
        raise ValueError("operator_key is also one of api_keys or metrics_key: give another one")


def _check_key(name: str, key: str) -> None:
    if not key:
        raise ValueError(f"{name} is empty: remove it, or give a key")
    if len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(
            f"{name} has {len(key)} characters, at most {MAX_KEY_CHARACTERS} are accepted"
        )
    wrong = next((at for at, one in enumerate(key) if not "!" <= one <= "~"), None)
    if wrong is not None:
        raise ValueError(
            f"{name}: character {wrong + 1} of {len(key)} is white space, a control character or "
            "not ASCII; no Authorization header can carry that: use visible ASCII characters"
        )


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
