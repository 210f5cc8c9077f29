"""tiktoken.model against a slow byte-pair encoder with Python's regex library."""

import base64
import itertools
import json
import random
from pathlib import Path

import pytest
import regex  # type: ignore[import-untyped]

from contracts.errors import CheckpointError
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import PATTERNS, tokenizer_digest
from tests.support.one_line_errors import one_line_error

TEXTS = [
    "Hello world, it's 12345 o'clock!\n\n  Next\tline   ",
    "中文English混合, Ça va? DON'T naïveté ÜBER ςΣ\r\n",
    "def f(x):\n    return x**2  # ½ 𝄞🙂👩‍👩‍👧",
]


def ranks_of(texts: list[str], merges: int = 60) -> dict[bytes, int]:
    """Return byte ranks, then the most frequent pairs, as training of byte pairs does."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in word.encode()] for text in texts for word in words_of(text)]
    for _ in range(merges):
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in itertools.pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max((each for each in counts if each not in ranks), key=lambda each: counts[each])
        ranks[best] = len(ranks)
        words = [merged(word, best) for word in words]
    return ranks


def words_of(text: str) -> list[str]:
    return [match[0] for match in regex.finditer(PATTERNS["kimi_k2"], text, flags=regex.V1)]


def merged(word: list[bytes], token: bytes) -> list[bytes]:
    """Return the word with its leftmost pairs that are `token` merged."""
    found: list[bytes] = []
    for part in word:
        if found and found[-1] + part == token:
            found[-1] = token
        else:
            found.append(part)
    return found


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Merge the pair of the lowest rank, the leftmost first, until none has a rank."""
    ids = []
    for word in words_of(text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [
                (ranks[left + right], at)
                for at, (left, right) in enumerate(itertools.pairwise(parts))
                if left + right in ranks
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks_of(TEXTS * 2).items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    special = {"content": "<|im_end|>", "special": True}
    config = {
        "added_tokens_decoder": {"318": special},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    return tmp_path


def test_ids_equal_those_of_a_slow_byte_pair_encoder(folder: Path) -> None:
    ranks, tokenizer, chance = ranks_of(TEXTS * 2), Tokenizer.load(folder), random.Random(0)
    letters = "".join(TEXTS)
    made = ["".join(chance.choices(letters, k=chance.randint(0, 40))) for _ in range(200)]
    for text in [*TEXTS, *made]:
        ids = tokenizer.encode(text)
        assert ids == encoded(text, ranks), text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.encode("a<|im_end|>") == [97, 318]
    assert tokenizer.encode("<|reserved_token_316|>") == [316]
    assert tokenizer.vocab_size == 316 + 256
    assert len(tokenizer_digest(folder)) == 32


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("config.json", '{"model_type": "qwen3_moe"}', ["auto_map", "tokenization_kimi", "code"]),
        ("tiktoken.model", "aGk= 0\nnothing", ["tiktoken.model", "line 2"]),
        ("tiktoken.model", "aGk= 0", ["tiktoken.model", "ranks"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9999": {"content": "<x>"}}}',
         ["added_tokens_decoder", "9999"]),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused_by_name(
    folder: Path, name: str, content: str, parts: list[str]
) -> None:
    (folder / name).write_text(content)
    with one_line_error(CheckpointError, *parts):
        Tokenizer.load(folder)
