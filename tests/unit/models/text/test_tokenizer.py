"""Ids and prompts equal those of `transformers`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cluster.http.text import TokenizerPool
from contracts.errors import CheckpointError, RequestError
from models.text.encoding_steps import finish
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer
from tests.support.tiny_tokenizer import EOS, write_byte_level, write_sentencepiece_like
from tests.support.tokenization import continuations

WRITERS = {"byte_level": write_byte_level, "sentencepiece": write_sentencepiece_like}
TEXTS = [
    "The quick brown fox",
    "  spaces  and\ttabs\n\n",
    "größer 你好 😀 \u0000 e\u0301",
    f"a special {EOS} token inside",
    "",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|> there"},
]


@pytest.fixture(scope="module", params=sorted(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, special: bool
) -> None:
    assert tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_equals_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, skip: bool
) -> None:
    ids = oracle.encode(text)
    expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text(max_size=40))
def test_ids_of_any_text_equal_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    assert tokenizer.encode(text) == oracle.encode(text)


def test_chat_prompt_equals_transformers(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(folder).encode_chat(MESSAGES) == expected


def test_template_comes_from_jinja_file_or_default_name(
    tmp_path: Path,
) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ eos_token }}{{ messages[0].content | tojson }}"},
    ]
    folder = write_byte_level(tmp_path, chat_template=named)
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "<ü>"}]) == f'{EOS}"<ü>"'
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "from the file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_failing_template_raises_request_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_developer_message_becomes_system_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    assert "<|im_start|>system\nDo." in tokenizer.render_chat(
        [{"role": "developer", "content": "Do."}]
    )


def test_model_without_template_rejects_chat_with_remedy(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.encode_chat(MESSAGES)


def _remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _truncate(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:100])


def _break_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


def _break_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")


def _make_config_a_list(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")


@pytest.mark.parametrize(
    "damage", [_remove, _truncate, _break_config, _break_template, _make_config_a_list]
)
def test_damaged_folder_gives_one_line_error(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = write_byte_level(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_truncation_in_file_is_ignored(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(tree))
    assert len(Tokenizer.load(folder).encode("The quick brown fox jumps")) > 2


def test_half_surrogate_pair_raises_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError):
        tokenizer.encode("a\ud800b")


def test_long_texts_have_same_ids_in_thread(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * (THREAD_ABOVE_CHARACTERS // 10)
    threads = TokenizerPool(tokenizer, 1)
    made: list[int] = []
    texts = [text, "short", text]
    assert asyncio.run(
        threads.encode(texts, made.append, param="x", characters=10**6)
    ) == tokenizer.encode_many(texts)
    assert sum(made) == sum(map(len, tokenizer.encode_many(texts)))


@given(prompt=st.text(max_size=20), continuation=st.text(min_size=1, max_size=10))
def test_continuation_is_rest_of_whole_text(
    tokenizer: Tokenizer, prompt: str, continuation: str
) -> None:
    prompt_ids, (continuation_ids,) = continuations(tokenizer, prompt, [continuation])
    whole = tokenizer.encode(prompt + continuation)
    assert continuation_ids == whole[len(prompt_ids) :]
    assert prompt_ids == tokenizer.encode(prompt.rstrip())


words = st.sampled_from(["word", "Größe", "x1", "10", "'s", "…", "\n\n", "  ", "你好", "a.b", "?"])


@given(
    prompts=st.lists(
        st.tuples(
            st.lists(words, max_size=60).map(" ".join),
            st.sampled_from(["", "\nKind:", "\nAnswer: ", "\n\nIt is", "\n(", ".\nSo"]),
        ).map("".join),
        min_size=1,
        max_size=3,
    ),
    texts=st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=3),
)
def test_continuations_of_long_prompts_equal_whole_texts(
    tokenizer: Tokenizer, prompts: list[str], texts: list[str]
) -> None:
    pairs = [(prompt, texts) for prompt in prompts]
    found_pairs = finish(tokenizer.continuation_steps(pairs, param="prompt"))
    for prompt, (prompt_ids, found) in zip(prompts, found_pairs, strict=True):
        assert prompt_ids == tokenizer.encode(prompt.rstrip())
        whole = [tokenizer.encode(prompt + text) for text in texts]
        assert found == [ids[len(prompt_ids) :] for ids in whole]
