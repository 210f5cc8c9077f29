"""Tokenizer files of a Hugging Face folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from contracts.errors import CheckpointError

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TokenizerFiles(NamedTuple):
    """special_tokens: {"bos_token": "<s>", ...}.

    chat_template: None without one. tool_template: used instead if a chat has tools.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files. Raises CheckpointError, in one line."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json (a fast tokenizer is needed)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
        raise CheckpointError(f"{path}: cannot be read: {_one_line(error)}") from None
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    _add_tokens(backend, config, special)
    return TokenizerFiles(backend, special, *_templates(folder, config))


def tokenizer_digest(folder: Path) -> bytes:
    """Return 32 bytes, equal for folders with equal token ids. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty without such a file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Return {"bos_token": "<s>", ...} from the first source that states each."""
    found: dict[str, str] = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_NAMES):
        for source in sources:
            text = _text(source.get(name))
            if text is not None:
                found.setdefault(name, text)
    return found


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]
) -> None:
    """Apply what tokenizer_config.json says about added tokens, as `transformers` does.

    A token is special if tokenizer.json or added_tokens_decoder marks it, or if it has a name.
    Tokens that tokenizer.json lacks are added, in the order of their ids.
    """
    listed = config.get("added_tokens_decoder")
    named, more = _named_tokens(config, special)
    stored = backend.get_added_tokens_decoder()
    try:
        if listed is None:
            tokens = [token for _, token in sorted(stored.items())]
        else:
            ids = sorted(listed.items(), key=lambda item: int(item[0]))
            tokens = [AddedToken(**token) for _, token in ids]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder cannot be used: {_one_line(error)}"
        ) from None
    marked = {token.content for token in stored.values() if token.special} | {*named}
    for token in tokens:
        token.special = token.special or token.content in marked
    backend.add_tokens(tokens)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in (*named, *more) if text not in known]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in missing]
    )


def _named_tokens(config: dict[str, Any], special: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the texts of special tokens with a name (such as image_token), and without one."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    entries = {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        entries |= extra
        extra = []
    named = filter(None, map(_text, entries.values()))
    more = filter(None, map(_text, extra if isinstance(extra, list) else []))
    return [*special.values(), *named], list(more)


def _text(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the templates "default" and "tool_use": .jinja files before tokenizer_config.json."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    found = {name: _read_template(path) for name, path in files.items() if path.is_file()}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        stated = [{"name": "default", "template": stated}]
    if not found and isinstance(stated, list):
        try:
            found = {entry["name"]: entry["template"] for entry in stated}
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                "tokenizer_config.json: chat_template: expected a text, or a list of objects with "
                f"name and template: {_one_line(error)}"
            ) from None
    return found.get("default"), found.get("tool_use")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
