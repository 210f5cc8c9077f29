"""Stop strings and sequence texts do not depend on token batches."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.http.text import SequenceText, StopStrings
from contracts.config import HttpConfig
from contracts.messages import Finished, TokenLogprob, Tokens
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import CONTEXT_TOKENS, Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece_like

TAGS = ("<think>", "</think>")
Letters = st.text(alphabet="ab", max_size=30)
Stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


@pytest.fixture(scope="module", params=[write_byte_level, write_sentencepiece_like])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tags = {str(500 + n): {"content": tag, "special": True} for n, tag in enumerate(TAGS)}
    folder = request.param(tmp_path_factory.mktemp("tagged"), added_tokens_decoder=tags)
    return Tokenizer.load(folder)


def slow_stop(text: str, stops: list[str]) -> str:
    """Reference: the first position where the text ends with a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(text=Letters, stops=Stops, cut=st.lists(st.integers(1, 5)))
@example(text="bab", stops=["bab", "a"], cut=[3])
def test_text_ends_before_first_completed_stop(text: str, stops: list[str], cut: list[int]) -> None:
    filter_ = StopStrings(stops)
    shown, start = "", 0
    for size in [*cut, len(text)]:
        shown += filter_.push(text[start : start + size])
        start += size
        assert slow_stop(text, stops).startswith(shown)
    assert shown + filter_.flush() == slow_stop(text, stops)


def test_text_without_partial_stop_is_shown_at_once() -> None:
    filter_ = StopStrings(["###", "\n\n"])
    assert filter_.push("one #") == "one "
    assert filter_.push("1\n") == "#1"
    assert filter_.push("two") == "\ntwo"


def whole(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], sizes: list[int]
) -> tuple[str, list[int], str | None, int]:
    """Return text, tokens, reason and token count for groups of `sizes`."""
    text = SequenceText(tokenizer, prompt_ids=[1, 1, 1], stops=stops, shows_tags=True)
    shown, tokens, start, reason = "", [], 0, None
    usage = Usage(prompt_tokens=3, completion_tokens=len(ids))
    for size in [*sizes, *([1] * len(ids)), 0]:
        part = ids[start : start + size]
        start += size
        done = size == 0
        event = (
            Finished(1, "length", usage)
            if done
            else Tokens(1, part, [TokenLogprob(-1.0)] * len(part))
        )
        delta = text.push([event])
        shown += delta.text
        tokens += [token.token_id for token in delta.tokens]
        reason = delta.finish_reason
        if text.finished:
            break
    return shown, tokens, reason, text.usage.completion_tokens


@given(
    source=st.lists(st.sampled_from(["ab", "b", "你", "😀", *TAGS]), max_size=25).map("".join),
    stops=Stops,
    sizes=st.lists(st.integers(1, 4)),
)
def test_sequence_does_not_depend_on_token_batches(
    tokenizer: Tokenizer, source: str, stops: list[str], sizes: list[int]
) -> None:
    ids = tokenizer.encode(source, add_special_tokens=False)
    at_once = whole(tokenizer, ids, stops, [max(len(ids), 1)])
    assert whole(tokenizer, ids, stops, sizes) == at_once
    assert at_once[0].replace(" ", "") == slow_stop(source, stops)
    if not stops:
        assert at_once[1] == ids


def test_tokens_cut_off_by_stop_count_in_usage(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab.c")
    text, tokens, reason, count = whole(tokenizer, ids, ["."], [])
    assert (text, reason) == ("ab", "stop")
    assert tokenizer.decode(tokens) == "ab"
    assert count == len(tokenizer.encode("ab."))


TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT: Any = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = write_sentencepiece_like(tmp_path_factory.mktemp("t"), chat_template=TEMPLATE)
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [60])], eos_text="</s>") as api:
        yield api


def test_tokenize_then_detokenize_returns_text(api: Api) -> None:
    answer = api.post("/tokenize", prompt="The quick 😀", return_token_strs=True).json()
    ids = api.tokenizer.encode("The quick 😀")
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == CONTEXT_TOKENS
    assert answer["token_strs"][0] == "<s>"
    back = api.post("/detokenize", tokens=ids).json()
    assert back == {"prompt": api.tokenizer.decode(ids, skip_special_tokens=False)}
    assert api.rank.submits.empty()


def test_special_tokens_are_added_to_text_and_on_request_to_conversation(api: Api) -> None:
    plain = api.tokenizer.encode("a", add_special_tokens=False)
    assert api.post("/tokenize", prompt="a", add_special_tokens=False).json()["tokens"] == plain
    chat = api.tokenizer.encode_chat(CHAT)
    assert api.post("/tokenize", messages=CHAT).json()["tokens"] == chat
    with_special = api.post("/tokenize", messages=CHAT, add_special_tokens=True).json()
    assert with_special["tokens"] == api.tokenizer.encode(api.tokenizer.render_chat(CHAT))
    open_ended = api.post("/tokenize", messages=CHAT, add_generation_prompt=False).json()
    assert open_ended["count"] < len(chat)
    assert with_special["token_strs"] is None


@pytest.mark.parametrize("adds", [None, True, False])
def test_special_tokens_of_prompt_and_chat_are_added_as_requested(
    api: Api, adds: bool | None
) -> None:
    chat = api.tokenizer.render_chat(CHAT)
    for path, body, text, default in (
        ("/v1/completions", {"prompt": "a"}, "a", True),
        ("/v1/chat/completions", {"messages": CHAT}, chat, False),
    ):
        answer = api.post(path, **body, max_tokens=1, add_special_tokens=adds)
        assert answer.status_code == 200, answer.text
        expected = api.tokenizer.encode(text, default if adds is None else adds)
        assert api.rank.submits.get(timeout=5).token_ids == expected


def test_tokenize_requires_key_but_no_model(
    api: Api, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert api.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert api.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    rank = FakeRank("attention-0", lambda submit: [60])
    with serve_api(api.folder, [rank], HttpConfig(api_keys=["k" * 8]), eos_text="</s>") as keyed:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert keyed.http.post(path, json=body).status_code == 401
            headers = {"Authorization": f"Bearer {'k' * 8}"}
            assert keyed.http.post(path, json=body, headers=headers).status_code == 200
