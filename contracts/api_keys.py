"""Validation of bearer tokens. Error messages name the position of a key, never the key."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
