"""/tokenize and /detokenize, compatible with vLLM's clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from contracts.config import HttpConfig
from tests.support.api_harness import CONTEXT_TOKENS, Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_sentencepiece_like

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
