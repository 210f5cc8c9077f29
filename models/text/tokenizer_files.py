"""Tokenizer files of a Hugging Face folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from contracts.errors import CheckpointError
from models.text.tiktoken_file import PATTERNS, read_tiktoken

TOKENIZER, TIKTOKEN = "tokenizer.json", "tiktoken.model"
_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA, _FORMER_EXTRA = "extra_special_tokens", "additional_special_tokens"
Token = str | AddedToken


class TokenizerFiles(NamedTuple):
    """special_tokens: {"bos_token": "<s>", "image_token": "<image>", ...}.

    chat_template: None without one. tool_template: used instead if a chat has tools.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files. Raises CheckpointError, in one line."""
    config = _read_json(folder / "tokenizer_config.json")
    backend = _read_backend(folder, config)
    try:
        named = _add_tokens(backend, folder, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the added tokens beside tokenizer.json cannot be used: {_one_line(error)}"
        ) from None
    special = {name: str(token) for name, token in named.items()}
    return TokenizerFiles(backend, special, *_templates(folder, config))


def tokenizer_digest(folder: Path) -> bytes:
    """Return 32 bytes, equal for folders with equal token ids. Raises CheckpointError."""
    path = folder / TOKENIZER
    if not path.is_file() and (folder / TIKTOKEN).is_file():
        path = folder / TIKTOKEN
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _read_backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
            raise CheckpointError(f"{path}: cannot be read: {_one_line(error)}") from None
    kind = _read_json(folder / "config.json").get("model_type")
    if (folder / TIKTOKEN).is_file() and kind in PATTERNS:
        special = _decoder_tokens(folder, config.get("added_tokens_decoder") or {})
        return read_tiktoken(folder / TIKTOKEN, PATTERNS[kind], special)
    code = config.get("auto_map")
    if code is not None:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: auto_map: {code!r:.128} is code of the"
            f" checkpoint, which is never run; add a {TOKENIZER}"
        )
    raise CheckpointError(
        f"{folder}: no {TOKENIZER} (a fast tokenizer is needed); make one of "
        "tokenizer.model: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


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


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]
) -> dict[str, Token]:
    """Apply what the files state about added tokens, as `transformers` 5 does.

    added_tokens_decoder of tokenizer_config.json, if present, excludes special_tokens_map.json and
    added_tokens.json. Else special_tokens_map.json overrides tokenizer_config.json, and
    tokenizer.json overrides added_tokens.json. Returns the special tokens with a name.
    """
    stated = dict(config)
    if _FORMER_EXTRA in stated and not stated.get(_EXTRA):
        stated[_EXTRA] = stated.pop(_FORMER_EXTRA)
    named_extra = _pop_named(stated)
    stored = backend.get_added_tokens_decoder()
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        _override(stated, named_extra, _read_json(folder / "special_tokens_map.json"))
        added = {**_legacy_tokens(folder, stated), **stored}
    else:
        added = _decoder_tokens(folder, decoder)
    known = {str(token): token for token in added.values()}
    named = {name: known.get(str(token), token) for name, token in _tokens(stated, _NAMES)}
    named |= _tokens(stated, [n for n in stated if n.endswith("_token") and n not in _NAMES])
    named |= _tokens(named_extra, named_extra)
    extra = stated[_EXTRA] if _EXTRA in stated else stated.get(_FORMER_EXTRA)
    tokens: list[Token] = [token for _, token in sorted(added.items())]
    present = {*map(str, tokens), *(token.content for token in stored.values())}
    for token in (*named.values(), *map(_token, extra or [])):
        if str(token) not in present and token not in tokens:
            tokens.append(token)
    _add(backend, tokens, special={str(token) for token in named.values()})
    marked = {token.content for token in stored.values() if token.special}
    current = backend.get_added_tokens_decoder().values()
    lost = [token for token in current if token.content in marked and not token.special]
    _add(backend, lost, marked)  # the library keeps a mark that later flags lack
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return named


def _decoder_tokens(folder: Path, decoder: Any) -> dict[int, AddedToken]:
    try:
        return {int(token_id): AddedToken(**token) for token_id, token in decoder.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder cannot be used: "
            f"{_one_line(error)}"
        ) from None


def _pop_named(stated: dict[str, Any]) -> dict[str, Any]:
    """Remove and return tokens with names of the model's own, such as image_token."""
    names = [n for n in stated if n.endswith("_token") and n not in _NAMES]
    found = {name: stated.pop(name) for name in names if isinstance(stated[name], str)}
    return found | (stated.pop(_EXTRA) if isinstance(stated.get(_EXTRA), dict) else {})


def _override(stated: dict[str, Any], named: dict[str, Any], special: dict[str, Any]) -> None:
    """Merge special_tokens_map.json into the other statements."""
    for name, token in special.items():
        if name == _EXTRA and isinstance(token, list):
            token = [*(stated.get(_EXTRA) or []), *token]
        elif name != _EXTRA and isinstance(token, dict):
            token = _token({**token, "special": True})
        stated[name] = token
    if isinstance(stated.get(_EXTRA), dict):
        named.update(stated.pop(_EXTRA))


def _legacy_tokens(folder: Path, stated: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json: {"<tool>": 32000, ...}."""
    values = (*map(stated.get, _NAMES), *(stated.get(_EXTRA) or []))
    special = {str(token) for token in values if isinstance(token, Token)}  # not those with flags
    return {
        index: AddedToken(text, special=text in special, normalized=text not in special)
        for text, index in _read_json(folder / "added_tokens.json").items()
    }


def _tokens(stated: dict[str, Any], names: Iterable[str]) -> list[tuple[str, Token]]:
    """Return (name, token) of each that is stated as a token."""
    found = ((name, stated.get(name)) for name in names)
    return [(name, _token(value)) for name, value in found if isinstance(value, Token | dict)]


def _token(value: Any) -> Token:
    """Return a token that is stated as text or object. Raises TypeError."""
    if isinstance(value, dict):
        return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    if not isinstance(value, Token):
        raise TypeError(f"expected a text or an object, got {value!r:.64}")
    return value


def _add(backend: tokenizers.Tokenizer, tokens: Sequence[Token], special: Container[str]) -> None:
    """Add tokens, or change the flags of those that exist."""
    added = [AddedToken(each, special=True) if isinstance(each, str) else each for each in tokens]
    for token in added:
        token.special = token.special or token.content in special
    backend.add_tokens(added)


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the templates "default" and "tool_use": .jinja files before tokenizer_config.json."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    found = {name: _read_template(path) for name, path in files.items() if path.is_file()}
    stated = config.get("chat_template")
    if stated is None:
        stated = _read_json(folder / "chat_template.json").get("chat_template")
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
