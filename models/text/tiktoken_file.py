"""Tokenizers that are stored for the library `tiktoken`.

Such a file has a line for each token: its bytes in base64, and its rank, which is its id. How text
is split is in the checkpoint's own code, which is never run: the patterns of known models are here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from contracts.errors import CheckpointError

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
