"""Tokenizer files of a Hugging Face folder: tokenizer.json and the files beside it.

In its place there may be a file of the library `tiktoken`. It has a line for each token: its bytes
in base64, and its rank, which is its id. How text is split is in the checkpoint's own code, which
is never run: the patterns of known models are here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from contracts.errors import CheckpointError

TOKENIZER, TIKTOKEN = "tokenizer.json", "tiktoken.model"
_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA, _FORMER_EXTRA = "extra_special_tokens", "additional_special_tokens"
Token = str | AddedToken
_NO_LETTER: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI: Final = (
    r"[\p{Han}]+",
    rf"{_NO_LETTER}{_UPPER}*{_LOWER}+{_ENDING}",
    rf"{_NO_LETTER}{_UPPER}+{_LOWER}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERNS: Final[Mapping[object, str]] = {
    model: "|".join(_KIMI) for model in ("kimi_k2", "kimi_linear")
}
"""Pattern of the words of a text, by model_type."""
_RESERVED: Final = 256  # ids of special tokens behind the others


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


def read_tiktoken(
    path: Path, pattern: str, special: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file. special: tokens by id. Raises CheckpointError."""
    ranks = _read_ranks(path)
    letters = byte_level_alphabet()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = sorted(
        (rank, ranks[token[:cut]], ranks[token[cut:]], names[token[:cut]], names[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )
    model = models.BPE(
        vocab={names[token]: rank for token, rank in ranks.items()},
        merges=[(left, right) for _, _, _, left, right in merges],
        ignore_merges=True,
    )
    backend = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder = decoders.ByteLevel()
    ids = range(len(ranks), len(ranks) + _RESERVED)
    if special and max(special) >= ids.stop:
        raise CheckpointError(
            f"{path}: has ids below {ids.stop}, but added_tokens_decoder of tokenizer_config.json"
            f" has {max(special)}"
        )
    reserved = {each: AddedToken(f"<|reserved_token_{each}|>", special=True) for each in ids}
    backend.add_special_tokens([special.get(each, token) for each, token in reserved.items()])
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    ranks = {}
    for number, line in enumerate(lines):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path}: line {number + 1} is not a token in base64 and its rank"
            ) from None
    has_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if not has_bytes or sorted(ranks.values()) != list(range(len(lines))):
        raise CheckpointError(f"{path}: ranks are not 0 to {len(lines) - 1}, or a byte has none")
    return ranks


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's character of each byte: itself if printable, else U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return alphabet
