"""The unmodified `openai` client against the API and a fake rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from contracts.messages import Submit
from tests.support.api_harness import MODEL, Api, serve_api
from tests.support.fake_rank import CACHED_TOKENS, FakeRank
from tests.support.tiny_tokenizer import EOS

TEXT = "The answer is 42. 你好 😀\n\nQuestion: what else?"
CHAT: Any = [{"role": "user", "content": "What is the answer?"}]


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    rank = FakeRank("attention-0", lambda submit: [])
    with serve_api(folder, [rank]) as api:
        eos = api.tokenizer.encode(EOS, add_special_tokens=False)
        reply = api.tokenizer.encode(TEXT) + eos

        def seeded(submit: Submit) -> list[int]:
            seed = submit.sampling.seed if submit.sampling else None
            return reply if seed is None else api.tokenizer.encode(f"seed {seed}") + eos

        rank.reply = seeded
        yield api


def complete(api: Api, **fields: Any) -> Any:
    return api.openai.completions.create(model=MODEL, **fields)


def chat(api: Api, **fields: Any) -> Any:
    return api.openai.chat.completions.create(model=MODEL, messages=CHAT, **fields)


def text_tokens(api: Api, text: str) -> int:
    return len(api.tokenizer.encode(text))


def test_completion_has_text_reason_and_usage(api: Api) -> None:
    done = complete(api, prompt="Hello", max_tokens=200)
    assert done.object == "text_completion"
    assert done.choices[0].text == TEXT
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.prompt_tokens == text_tokens(api, "Hello")
    assert done.usage.completion_tokens == text_tokens(api, TEXT) + 1  # eos counts
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS


def test_streamed_completion_has_same_text(api: Api) -> None:
    stream = complete(
        api, prompt="Hello", max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert not any("\ufffd" in c.choices[0].text for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == text_tokens(api, TEXT) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        # bodies of load generators: vLLM's, SGLang's, GuideLLM's, AIPerf's
        ("completions", {"temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None}),
        ("completions", {"best_of": 1, "use_beam_search": False, "ignore_eos": True, "n": 1}),
        ("completions", {"stop": [f"\n{n}" for n in range(16)], "ignore_eos": True}),
        ("completions", {"max_tokens": 4.0, "n": 1.0, "top_k": 5.0, "ignore_eos": True}),
        ("completions", {"prompt": ["Hi"], "stop": None, "min_tokens": 4, "ignore_eos": True}),
        ("completions", {"max_completion_tokens": 4, "max_tokens": 9, "ignore_eos": True}),
        ("chat/completions", {"max_completion_tokens": 4, "ignore_eos": True, "stop": None}),
        ("chat/completions", {"min_tokens": 4, "lora_path": None, "top_k": -1, "seed": 1}),
    ],
)
def test_bodies_of_load_generators_are_accepted(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    prompt = {"prompt": "Hi"} if path == "completions" else {"messages": CHAT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    limit = {} if "max_completion_tokens" in fields else {"max_tokens": 4}
    body = {"stream_options": options, **prompt, **limit, **fields}
    events = api.chunks(f"/v1/{path}", **body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_chat_completion_uses_rendered_template(api: Api) -> None:
    api.received()
    done = chat(api)
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == TEXT
    assert done.choices[0].finish_reason == "stop"
    submit = api.rank.submits.get(timeout=5)
    assert api.tokenizer.decode(submit.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_streamed_chat_starts_with_role_and_ends_with_usage(api: Api) -> None:
    stream = chat(api, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop_string_ends_text_and_cancels_rest(api: Api) -> None:
    done = complete(api, prompt="Hello", max_tokens=200, stop=["\n\nQuestion", "never"])
    assert done.choices[0].text == "The answer is 42. 你好 😀"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens < text_tokens(api, TEXT)
    assert done.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS


def test_stream_never_contains_part_of_stop_string(api: Api) -> None:
    stream = chat(api, stop="\n\nQuestion", stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "The answer is 42. 你好 😀"


def test_streamed_choices_keep_their_index(api: Api) -> None:
    stream = complete(api, prompt=["One", "Two"], max_tokens=50, seed=1, n=2, stream=True)
    texts = ["", "", "", ""]
    reasons: dict[int, str] = {}
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == ["seed 1", "seed 2", "seed 1", "seed 2"]
    assert reasons == dict.fromkeys(range(4), "stop")


def test_completion_logprobs_match_text(api: Api) -> None:
    done = complete(api, prompt="Hello", max_tokens=6, logprobs=2)
    choice = done.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)


def test_chat_logprobs_have_bytes_and_alternatives(api: Api) -> None:
    done = chat(api, logprobs=True, top_logprobs=2)
    logprobs = done.choices[0].logprobs
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode() == TEXT
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_streamed_logprobs_equal_whole_answer(api: Api) -> None:
    whole = complete(api, prompt="Hi", max_tokens=99, logprobs=1)
    stream = complete(api, prompt="Hi", max_tokens=99, logprobs=1, stream=True)
    tokens: list[str] = []
    for chunk in stream:
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens or []
    assert tokens == whole.choices[0].logprobs.tokens


def test_echo_without_generation_scores_prompt(api: Api) -> None:
    done = complete(api, prompt="The quick brown", max_tokens=0, echo=True, logprobs=1)
    choice = done.choices[0]
    assert choice.text == "The quick brown"
    assert choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == "The quick brown"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
    assert done.usage.completion_tokens == 0
    assert done.usage.prompt_tokens == len(choice.logprobs.tokens)


@pytest.mark.parametrize("more", [0, 6])
@pytest.mark.parametrize("prompt", ["Hi é there", f"user{EOS}\nagain {EOS}", "ids"])
def test_offsets_of_echo_count_what_is_shown(api: Api, prompt: str, more: int) -> None:
    given: Any = prompt
    if prompt == "ids":
        given = api.tokenizer.encode(f"{EOS}Hi é {EOS}there")
    done = complete(api, prompt=given, max_tokens=more, echo=True, logprobs=1)
    choice = done.choices[0]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)


@pytest.mark.parametrize(
    ("stop", "text"),
    [("<|im_start|>", "The answer is 42. "), ("42. <|im_start|> 你", "The answer is ")],
)
def test_stop_string_may_contain_text_of_special_tokens(
    api: Api, monkeypatch: pytest.MonkeyPatch, stop: str, text: str
) -> None:
    reply = api.tokenizer.encode("The answer is 42. <|im_start|> 你好 😀")
    monkeypatch.setattr(api.rank, "reply", lambda submit: reply)
    done = complete(api, prompt="Hello", max_tokens=200, stop=[stop])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text, "stop")


def test_eos_of_completion_is_listed_without_text(api: Api) -> None:
    """Clients such as lm-eval count generated tokens from the end."""
    done = complete(api, prompt="Hello", max_tokens=200, logprobs=0)
    choice = done.choices[0]
    assert choice.text == TEXT
    assert choice.logprobs.tokens[-1] == EOS
    assert choice.logprobs.text_offset[-1] == len(TEXT)
    assert len(choice.logprobs.tokens) == done.usage.completion_tokens


def test_models_are_listed_and_retrieved_by_name(api: Api) -> None:
    assert [model.id for model in api.openai.models.list()] == [MODEL]
    assert api.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        api.openai.models.retrieve("other")


def test_unknown_model_gets_404(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.openai.completions.create(model="other", prompt="Hello")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("path", ["/v1/{}/", "//v1/{}", "/v1//{}", "//v1///{}//"])
def test_additional_slashes_of_v1_routes_are_ignored(api: Api, path: str) -> None:
    url = api.url + path.format("completions")
    answer = api.http.post(url, json={"model": MODEL, "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    models = api.http.get(api.url + path.format("models"))
    assert models.json() == api.http.get("/v1/models").json()
    assert api.http.get(api.url + path.format("nothing")).status_code == 404
    assert api.http.get(f"{api.url}//load").status_code == 404
