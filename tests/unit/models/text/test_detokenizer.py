"""The joined pieces of a token stream equal the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.detokenizer import WindowDetokenizer
from models.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece_like

Cut = st.lists(st.integers(1, 4))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_sentencepiece_like(tmp_path_factory.mktemp("sentencepiece")))


def pieces(tokenizer: Tokenizer, ids: list[int], cut: list[int], *, hide: bool = True) -> list[str]:
    """Return the pieces of `ids` pushed in groups of the sizes in `cut`, then one by one."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=hide)
    out, start = [], 0
    for size in [*cut, *([1] * len(ids))]:
        out.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*out, detokenizer.flush()]


@given(text=st.text(max_size=60), cut=Cut)
def test_split_text_is_unchanged_byte_level(
    byte_level: Tokenizer, text: str, cut: list[int]
) -> None:
    assert "".join(pieces(byte_level, byte_level.encode(text), cut)) == text


@given(text=st.text(alphabet="aé你😀\u200d", min_size=1, max_size=30))
def test_pieces_have_no_broken_characters(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        assert not any("\ufffd" in piece for piece in pieces(tokenizer, tokenizer.encode(text), []))


@given(data=st.data(), cut=Cut)
def test_split_ids_equal_whole_decode_byte_level(
    byte_level: Tokenizer, data: st.DataObject, cut: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=30))
    assert "".join(pieces(byte_level, ids, cut)) == byte_level.decode(ids)


@given(data=st.data(), cut=Cut, hide=st.booleans())
def test_split_ids_equal_whole_decode_with_byte_fallback(
    sentencepiece: Tokenizer, data: st.DataObject, cut: list[int], hide: bool
) -> None:
    """Ids include invalid UTF-8 bytes, special tokens and unknown ids."""
    vocabulary = sentencepiece.vocab_size
    byte_ids = [i for i in range(vocabulary) if sentencepiece._fallback_byte(i) is not None]
    assert len(byte_ids) == 256
    one = st.one_of(st.sampled_from(byte_ids), st.integers(0, vocabulary + 3))
    runs = st.text(alphabet="é你😀", min_size=1, max_size=3).map(
        lambda text: [byte_ids[byte] for byte in text.encode()]
    )
    parts = data.draw(st.lists(st.one_of(one.map(lambda i: [i]), runs), max_size=20))
    ids = [i for part in parts for i in part]
    streamed = "".join(pieces(sentencepiece, ids, cut, hide=hide))
    assert streamed == sentencepiece.decode(ids, skip_special_tokens=hide)


def test_each_token_is_decoded_bounded_number_of_times() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    detokenizer = WindowDetokenizer(decode, _no_byte, lambda _: True)
    detokenizer.push(range(10_000))
    assert longest <= 4


def test_token_without_text_keeps_space_of_next_token() -> None:
    vocabulary = [" one", "", " two"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(vocabulary[i] for i in ids).removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, _no_byte, lambda _: True)
    assert [detokenizer.push([i]) for i in (0, 1, 1, 2)] == ["one", "", "", " two"]


def _no_byte(token_id: int) -> None:
    return None


def test_special_tokens_are_hidden_or_shown_as_requested(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    shown = byte_level.detokenizer(skip_special_tokens=False)
    assert "".join(pieces(byte_level, ids, [])) == "ab"
    assert shown.push(ids) + shown.flush() == "a<|im_end|>b"
