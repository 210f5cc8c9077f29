"""What a configured bearer token may be. Messages name a key's place, never the key: they end in
logs."""

from __future__ import annotations

from collections.abc import Sequence

MAX_KEY_CHARACTERS = 200  # must fit into the smallest max_header_bytes


def check_keys(api_keys: Sequence[str], metrics_key: str | None) -> None:
    """Raises ValueError for a key that would let everybody in, or nobody."""
    for index, key in enumerate(api_keys):
        _check_key(f"api_keys[{index}]", key)
        first = api_keys.index(key)
        if first < index:
            raise ValueError(f"api_keys[{index}] is the same as api_keys[{first}]: remove one")
    if metrics_key is not None:
        _check_key("metrics_key", metrics_key)


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
