"""Tokenizers equal those of `transformers`; the joined pieces of a stream equal the text."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cluster.http.text import TokenizerPool
from contracts.errors import RequestError
from models.text.chat_template import ChatTemplate, finish
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer, WindowDetokenizer
from tests.support.tiny_tokenizer import EOS, write_byte_level, write_sentencepiece_like

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
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_equals_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, skip: bool
) -> None:
    ids = oracle.encode(text)
    expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text(max_size=40) | st.sampled_from(TEXTS), special=st.booleans())
def test_ids_of_any_text_equal_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, special: bool
) -> None:
    assert tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special)


def test_chat_prompt_equals_transformers_and_template_is_found(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(folder).encode_chat(MESSAGES) == expected
    prompt = Tokenizer.load(folder).render_chat([{"role": "developer", "content": "Do."}])
    assert "<|im_start|>system\nDo." in prompt, "a developer message is a system message"
    template = ChatTemplate("By developers{% if messages[0].role == 'system' %}!{% endif %}", {})
    assert finish(template.render_steps([{"role": "developer"}], {})) == "By developers!"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ eos_token }}{{ messages[0].content | tojson }}"},
    ]
    folder = write_byte_level(tmp_path, chat_template=named)
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "<ü>"}]) == f'{EOS}"<ü>"'
    assert Tokenizer.load(folder).render_chat(MESSAGES, tools=[{}]) == "tools"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).render_chat(MESSAGES, tools=[{}]) == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    for given_tools in (None, tools):
        expected = oracle.apply_chat_template(MESSAGES, tools=given_tools, tokenize=False)
        assert Tokenizer.load(folder).render_chat(MESSAGES, tools=given_tools) == expected


@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
@pytest.mark.parametrize("given", ["It is ", " 4", "", [{"type": "text", "text": "So "}]])
def test_continued_message_equals_transformers(tmp_path: Path, content: str, given: Any) -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    shown = f"{{% if m.content is string %}}{{{{ {content} }}}}{{% else %}}{parts}{{% endif %}}"
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{shown}<end>{{% endfor %}}"
    folder = write_byte_level(tmp_path, chat_template=template)
    messages = [*MESSAGES, {"role": "assistant", "content": given}]
    expected = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        messages, continue_final_message=True, tokenize=False
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(messages, continue_final_message=True) == expected
    hidden = write_byte_level(tmp_path, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not show the last message"):
        Tokenizer.load(hidden).render_chat(messages, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('cannot use ' + 'this\ntext' * 999) }}",
    ],
)
def test_failing_template_raises_request_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.param == "messages"
    assert str(caught.value) == " ".join(str(caught.value)[:400].split())


def test_model_without_template_rejects_chat_with_remedy(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.encode_chat(MESSAGES)


def test_truncation_in_file_is_ignored(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    limit = {"max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tree["truncation"] = {"direction": "Right", **limit}
    path.write_text(json.dumps(tree))
    assert len(Tokenizer.load(folder).encode("The quick brown fox jumps")) > 2


def test_half_surrogate_is_rejected_and_long_texts_have_same_ids_in_thread(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(RequestError):
        tokenizer.encode("a\ud800b")
    text = "The quick brown fox. " * (THREAD_ABOVE_CHARACTERS // 10)
    made: list[int] = []
    texts = [text, "short", text]
    steps = tokenizer.encode_steps(texts, param="x")
    in_thread = asyncio.run(TokenizerPool(1).run(steps, 10**6, made.append))
    assert in_thread == tokenizer.encode_many(texts)
    assert sum(made) == sum(map(len, tokenizer.encode_many(texts)))


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


@given(text=st.text(max_size=60) | st.text(alphabet="aé你😀\u200d", max_size=30), cut=Cut)
def test_split_text_is_unchanged_without_broken_characters(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, cut: list[int]
) -> None:
    out = pieces(byte_level, byte_level.encode(text), cut)
    assert "".join(out) == text
    if "\ufffd" not in text:
        for found in (out, pieces(sentencepiece, sentencepiece.encode(text), [])):
            assert not any("\ufffd" in piece for piece in found)


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

    detokenizer = WindowDetokenizer(decode, lambda _: None, lambda _: True)
    detokenizer.push(range(10_000))
    assert longest <= 4


def test_token_without_text_keeps_space_of_next_token() -> None:
    vocabulary = [" one", "", " two"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(vocabulary[i] for i in ids).removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, lambda _: None, lambda _: True)
    assert [detokenizer.push([i]) for i in (0, 1, 1, 2)] == ["one", "", "", " two"]


@pytest.mark.parametrize("prompt", ["fox", "fox ", "größer", "<s>", "😀", ""])
def test_text_behind_prompt_is_what_it_adds_to_the_prompts_text(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, prompt: str
) -> None:
    before = oracle.encode(prompt)
    for text in ("dog", " dog", "😀!", "\n"):
        ids = oracle.encode(text, add_special_tokens=False)
        expected = oracle.decode(before + ids, skip_special_tokens=True)
        detokenizer = tokenizer.detokenizer(after=before)
        got = detokenizer.push(ids) + detokenizer.flush()
        assert oracle.decode(before, skip_special_tokens=True) + got == expected


def _statement(rng: random.Random, text: str) -> Any:
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    token = {"content": text, **{flag: rng.random() < 0.4 for flag in flags}}
    return rng.choice([text, {"__type": "AddedToken", **token}])


@pytest.mark.parametrize("seed", range(24))
def test_conflicting_token_files_are_read_as_transformers_does(tmp_path: Path, seed: int) -> None:
    """The four files state the same tokens, with different flags and names."""
    rng = random.Random(seed)
    texts = ["<a>", "<|c|>", "ox", " fo", "D d", EOS]
    folder = WRITERS[rng.choice(sorted(WRITERS))](tmp_path)
    tree = json.loads((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    ids = {token["content"]: token["id"] for token in tree["added_tokens"]}
    for text in texts:
        token_id = ids.get(text, tree["model"]["vocab"].get(text))
        if token_id is None:
            token_id = max(*tree["model"]["vocab"].values(), *ids.values()) + 1
        if text not in ids and rng.random() < 0.5:
            flags = _statement(rng, text)
            while isinstance(flags, str):
                flags = _statement(rng, text)
            del flags["__type"]
            tree["added_tokens"].append({"id": token_id, **flags})
            ids[text] = token_id

    def some(*names: str) -> dict[str, Any]:
        return {n: _statement(rng, rng.choice(texts)) for n in names if rng.random() < 0.5}

    config |= some("bos_token", "eos_token", "pad_token", "image_token")
    if seed % 2:
        stated = [(str(i), _statement(rng, text)) for text, i in ids.items()]
        config["added_tokens_decoder"] = {i: t for i, t in stated if isinstance(t, dict)}
        config["split_special_tokens"] = rng.random() < 0.3
    listed = [_statement(rng, text) for text in texts[:2]]
    config |= (
        {"additional_special_tokens": listed},
        {"extra_special_tokens": listed},
        {"extra_special_tokens": {"tool_token": rng.choice(texts)}},
    )[seed // 2 % 3]
    more = {"special_tokens_map": some("bos_token", "eos_token", "tool_token")}
    more["added_tokens"] = {**ids, "<new>": max(ids.values()) + 1}
    for name, content in {"tokenizer": tree, "tokenizer_config": config, **more}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    oracle, tokenizer = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.load(folder)
    assert tokenizer.special_tokens == oracle.special_tokens_map
    for _ in range(10):
        text = "".join(rng.choice([*texts, " ", "the", "<new>"]) for _ in range(8))
        ids_of_text = oracle.encode(text)
        assert tokenizer.encode(text) == ids_of_text
        for skip in (True, False):
            detokenizer = tokenizer.detokenizer(skip)
            shown = detokenizer.push(ids_of_text) + detokenizer.flush()
            assert shown == oracle.decode(ids_of_text, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{% if m.content is none %}NAME{% else %}{{ m.content }}{% endif %}", "f;hi;"),
        ("{% if m.content is none %}{% endif %}NAME{{ m.content | length }}", "f0;f2;"),
        ("NAME{% if m.content is not none %}({{ m.content }}){% endif %}", "f;f(hi);"),
    ],
)
def test_call_without_text_has_content_that_template_takes(shown: str, expected: str) -> None:
    shown = shown.replace("NAME", "{{ m.tool_calls[0].function.name }}")
    template = ChatTemplate(f"{{% for m in messages if m.tool_calls %}}{shown};{{% endfor %}}", {})
    called: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [{**called, "content": ""}, {**called, "content": "hi"}]
    assert finish(template.render_steps(messages, {})) == expected


@pytest.mark.parametrize("field", ["description + '!'", "parameters.properties | length", "name"])
def test_tool_has_fields_that_template_needs(field: str) -> None:
    source = f"{{% for t in tools or [] %}}{{{{ t.function.{field} }}}}{{{{ t }}}}{{% endfor %}}"
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    text = finish(ChatTemplate(source, {}).render_steps(MESSAGES, {"tools": tools}))
    assert ("parameters" in text) == (field != "name")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("m.content", "A\nB"),
        ("m.content if m.content is string else ''", "A\nB"),
        ("m.content if m.content is string else m.content | map(attribute='text') | join", "AB"),
        ("m.content if m.content is string else m.content | join('+', 'text')", "A+B"),
        ("m.content if m.content is string or m.role == 'tool' else m.content[0].text", "A\nB"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_go_to_templates_that_take_lists(
    tmp_path: Path, content: str, expected: str, role: str
) -> None:
    template = f"{{% for m in messages %}}{{{{ {content} }}}};{{% endfor %}}"
    folder = write_byte_level(tmp_path, chat_template=template)
    parts: list[Any] = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    chat: list[Any] = [{"role": role, "content": parts}, {"role": "user", "content": "C"}]
    assert Tokenizer.load(folder).render_chat(chat) == f"{expected};C;"
    if expected != "A\nB":
        oracle = PreTrainedTokenizerFast.from_pretrained(folder)
        assert oracle.apply_chat_template(chat, tokenize=False) == f"{expected};C;"


def test_text_parts_in_a_branch_of_tools(tmp_path: Path) -> None:
    text = "m.content | trim if tools or m.content is string else m.content | map(attribute='text')"
    template = f"{{% for m in messages %}}{{{{ ({text}) | join }}}};{{% endfor %}}"
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, chat_template=template))
    chat = [{"role": "user", "content": [{"type": "text", "text": text} for text in "AB"]}]
    for tools, expected in (([{"type": "function"}], "A\nB;"), (None, "AB;")):
        assert tokenizer.render_chat(chat, tools=tools) == expected
